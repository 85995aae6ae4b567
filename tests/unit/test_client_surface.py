"""How the client checks and converts its arguments, and what importing it loads."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
from tests.refusals import refused_with

import paramserver as ps
from paramserver.client.aio import AsyncModel
from paramserver.client.aio_worker import AsyncWorker
from paramserver.client.cluster import Cluster
from paramserver.client.control import assign, dataset_document, run_document
from paramserver.client.gradient_arrays import GradientArrays
from paramserver.client.gradients import Scan, prepare
from paramserver.client.reports import measured
from paramserver.client.same_host import SameHost
from paramserver.client.spec_builder import model_document, patch_document
from paramserver.core.layout import Layout
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.spec import ConsistencySpec, ModelSpec
from paramserver.net.addresses import urls_of
from paramserver.net.calls import Deadline
from paramserver.net.credentials import Credentials
from paramserver.types import AnyArray
from paramserver.wire.tensor import f32_to_bf16


def test_importing_is_light() -> None:
    """`import paramserver` and the client load neither kernels nor servers."""
    heavy = "numba fastapi redis sklearn uvicorn torch pydantic"
    used = "ps.connect, ps.Adam, ps.AsyncClient, ps.local"
    code = f"import sys, paramserver as ps; {used}; print([m for m in {heavy.split()!r} if m in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    """Every name in `__all__` can be accessed, and an unknown one raises AttributeError."""
    assert all(getattr(ps, name) is not None for name in ps.__all__)
    assert set(ps._HOME_OF) == set(ps.__all__)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = ps.nothing_such  # type: ignore[attr-defined]


@pytest.mark.parametrize("installed", [True, False])
def test_completion_shows_what_is_public_and_there(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """`dir` lists the public names, the subpackages and the version, and nothing that cannot be accessed."""
    torch = ModuleType("torch")
    torch.__spec__ = ModuleSpec("torch", None)
    monkeypatch.setitem(sys.modules, "torch", torch if installed else cast(Any, None))

    assert dir(ps) == sorted([*ps.__all__, "codecs", "__version__", *(["torch"] if installed else [])])


@pytest.mark.parametrize(
    "optimizer",
    [
        ps.SGD(0.1), ps.Momentum(), ps.Nesterov(), ps.Adagrad(), ps.RMSprop(), ps.Adam(betas=(0.8, 0.9)), ps.AdamW(),
        ps.FTRL(l1=0.1), ps.Sum(),
        ps.SGD(0.1, schedule=ps.Cosine(t_max=10, warmup=3), clip_norm=1.0, linear_scaling=True),
    ],
)  # fmt: skip
def test_optimizers_and_the_server_agree_on_every_field(optimizer: ps.Optimizer) -> None:
    """The server reads the document of each optimizer builder without loss, defaults included."""
    errors: list[ps.PsError] = []

    read = OptimizerSpec.read(optimizer.document(), "optimizer", errors)

    assert errors == []
    assert read.document() == optimizer.document()


@pytest.mark.parametrize("name", ["SGD", "Momentum", "Nesterov", "Adagrad", "RMSprop", "Adam", "AdamW", "FTRL", "Sum"])
def test_defaults_of_optimizers_are_the_servers(name: str) -> None:
    """An optimizer builder without arguments means the same as its bare name."""
    built = getattr(ps, name)()

    assert built.document() == OptimizerSpec.read({"name": built.name}, "optimizer", []).document()


@pytest.mark.parametrize(
    "built", [ps.Async(), ps.SSP(3), ps.Sync(quorum=0.75, late="fold"), ps.Buffered(4, lag="scale")]
)
def test_consistency_modes_and_the_server_agree(built: ps.Consistency) -> None:
    """The server reads the document of each consistency builder without loss."""
    errors: list[ps.PsError] = []

    read = ConsistencySpec.read(built.document(), "consistency", errors)

    assert errors == []
    assert read.document() == built.document()


def test_params_may_be_arrays_shapes_or_more() -> None:
    """Parameters may be arrays, shapes, numbers, `Param`s or dicts.

    Arrays are uploaded in their shape; float64 becomes float32 unless a dtype is given, float16 stays.
    """
    body, uploads = model_document(
        "m",
        {
            "a": np.zeros((2, 3)),
            "h": np.zeros(4, np.float16),
            "s": (10,),
            "n": 7,
            "i": np.int64(3),
            "e": (),
            "x": ps.Param((4, 4), init={"kind": "normal", "std": 0.1}, lr_scale=0.5, trainable=False),
            "d": ps.Param(np.zeros(2), dtype="float64"),
            "j": {"shape": [3], "init": {"kind": "constant", "value": 2.0}},
        },
        ps.Adam(),
        "async",
        {"partitions": None},
    )

    assert {n: (p["shape"], p.get("dtype"), p["init"]["kind"]) for n, p in body["params"].items()} == {
        "a": ([2, 3], "float32", "upload"), "h": ([4], "float16", "upload"), "s": ([10], "float32", "zeros"),
        "n": ([7], "float32", "zeros"), "i": ([3], "float32", "zeros"),
        "e": ([], "float32", "zeros"), "x": ([4, 4], "float32", "normal"),
        "d": ([2], "float64", "upload"), "j": ([3], None, "constant"),
    }  # fmt: skip
    assert sorted(uploads) == ["a", "d", "h"]
    assert body["params"]["x"]["trainable"] is False


def test_numbers_of_numpy_are_numbers() -> None:
    """NumPy numbers are accepted anywhere in a spec, and are sent as plain Python numbers."""
    real: Any = np.float32
    whole: Any = np.int64
    body, _ = model_document(
        "m",
        {"w": ps.Param((3,), lr_scale=real(0.5)), "j": {"shape": (whole(3),), "trainable": np.True_}},
        ps.Adam(lr=real(0.25), betas=(real(0.5), real(0.75)), schedule=ps.Cosine(t_max=whole(5))),
        ps.Sync(quorum=real(0.5), min_workers=whole(2)),
        {"partitions": whole(2), "evaluate_every": np.array(7)},
    )

    plain = (dict, list, str, bool, int, float, type(None))
    held: list[Any] = [body]
    while held:
        value = held.pop()
        assert type(value) in plain
        held += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    assert (body["optimizer"]["lr"], body["optimizer"]["betas"]) == (0.25, [0.5, 0.75])
    assert (body["partitions"], body["evaluate_every"]) == (2, 7)
    assert patch_document(None, None, None, {}, {"lr": np.float32(0.5)}) == {"optimizer": {"lr": 0.5}}


@pytest.mark.parametrize(
    ("lr", "must"),
    [(1e38, "a number of at least 0 and below 1e+38, not 1e"), (True, "not True"), (np.True_, "not True")],
)
def test_a_number_that_is_refused_is_told_its_bounds(lr: Any, must: str) -> None:
    """The error for a number out of bounds gives both bounds, and booleans are refused as numbers."""
    with pytest.raises(ps.RequestError, match=must.replace("+", r"\+")):
        model_document("m", {"w": (3,)}, ps.SGD(lr=lr), None, {})


def test_a_wrong_spec_is_told_before_anything_is_sent() -> None:
    """A spec with several mistakes raises one RequestError that lists them, when the document is built."""
    with pytest.raises(ps.RequestError) as values:
        model_document("m", {"a": np.array(["x"]), "b": np.array([np.nan])}, ps.SGD(), None, {})
    with pytest.raises(ps.RequestError) as fields:
        model_document("m", {"a": ps.Param((0,)), "b": (3,)}, ps.SGD(-1.0), None, {"partitions": 0})
    with pytest.raises(ps.RequestError) as names:
        model_document("x y", {"": (2,)}, None, None, {})

    assert [x["where"] for x in values.value.errors] == ["a", "b"]
    assert [x["detail"] for x in names.value.errors] == [
        "model name 'x y' is not allowed",
        "parameter name '' is not allowed",
    ]
    assert [x["where"] for x in fields.value.errors] == ["params.a.shape", "partitions", "optimizer.lr"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (np.array([1.0, np.nan]), "holds NaN or infinity"),
        (np.array([1.0, -np.inf], np.float16), "holds NaN or infinity"),
        (np.array([1.0, 1e300]), "holds numbers that are too large for float32"),
    ],
)
def test_first_values_that_cannot_be_held_are_told_before_anything_is_sent(wrong: AnyArray, why: str) -> None:
    """Initial values that cannot be stored are refused when the document is built.

    The error names the parameter and says whether its numbers are not finite or too large.
    """
    with refused_with("non_finite", ps.RequestError, match=f"'w' {why}"):
        model_document("m", {"w": wrong}, None, None, {})


@pytest.mark.parametrize(
    ("optimizer", "consistency", "says"),
    [
        (ps.Adam, None, r"optimizer: Adam is a class \(ps.Adam\(...\) makes one\)"),
        (type("Adam", (), {}), None, r"optimizer: Adam is a class \(ps.Adam\(...\) makes one\)"),
        (
            type("Adam", (), {"__repr__": lambda _: "Adam (\nlr: 1"})(),
            None,
            r"not Adam \( lr: 1 \(ps.Adam\(...\) makes",
        ),
        (type("LBFGS", (), {}), None, r"optimizer: LBFGS is a class \(ps.Adam"),
        (5, None, "optimizer: must be an object, not 5"),
        (None, ps.SSP, "consistency: SSP is a class"),
        (None, 3, "consistency: must be an object, not 3"),
    ],
)
def test_what_is_no_optimizer_or_mode_is_told(optimizer: Any, consistency: Any, says: str) -> None:
    """Neither a new model nor a patch takes a class, a number or torch's own optimizer; the hint names ours."""
    with pytest.raises(ps.RequestError, match=says):
        model_document("m", {"w": (3,)}, optimizer, consistency, {})
    with pytest.raises(ps.RequestError, match=says):
        patch_document(optimizer, consistency, None, {}, {})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: urls_of(cast(Any, ["http://a:1"]), {}), "is text, not.*separated by commas"),
        (lambda: urls_of("http://a:99999", {}), "a name or IP address and a port from 1 to 65535"),
        (lambda: Credentials.of(cast(Any, b"abc"), None), "a token is one word"),
        (lambda: patch_document(None, None, cast(Any, ["w"]), {}, {}), "params: must be an object"),
        (lambda: next(assign(Cluster(("http://a:1",)), "m", cast(Any, np.ones(3)), Deadline.after(1))), "map names to"),
        (lambda: run_document("m", "a:b", None, cast(Any, [1]), 1, None, 0, 0), "args: must be an object"),
        (lambda: run_document("m", "a:b", None, None, 1, cast(Any, 5), 0, 0), "stop: must be an object"),
        (lambda: run_document("m", cast(Any, len), None, None, 1, None, 0, 0), "entry: .*'package.module:function'"),
        (lambda: measured(None), "by name, not None.*return"),
        (lambda: measured({"accuracy": "high"}), "must be a number"),
    ],
)
def test_an_argument_of_another_kind_is_refused_in_words(call: Callable[[], Any], says: str) -> None:
    """An argument of a wrong kind raises RequestError that says what is expected, not an error from within."""
    with pytest.raises(ps.RequestError, match=says):
        call()


class Bf16:
    """Like a torch tensor in bfloat16."""

    def __array__(self, *_: Any, **__: Any) -> AnyArray:
        raise TypeError("Got unsupported ScalarType BFloat16")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "'w' is None, not an array of numbers"),
        ({"x": 1.0}, "'w' is a dict, not an array of numbers"),
        (np.array([1.0, None]), "'w' has dtype object, which cannot hold numbers"),
        (np.array(["a"]), "'w' has dtype <U1, which cannot hold numbers"),
        (Bf16(), r"'w' cannot be converted to an array: Got.*\(.*torch.*\.float\(\) if it is bfloat16\)"),
    ],
)
def test_what_is_no_array_of_numbers_is_told(value: Any, says: str) -> None:
    """Values and gradients that are no numbers are refused alike, as what they are: the gradient of a tensor is None.

    The hint says what a torch tensor needs.
    """
    with pytest.raises(ps.RequestError, match=says):
        model_document("m", {"w": ps.Param(value)}, None, None, {})
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [2]}}}))
    with pytest.raises(ps.RequestError, match=says):
        prepare(layout, {"w": value})
    if not isinstance(value, dict):  # then it is gradients by name
        with pytest.raises(ps.RequestError, match=says.replace("'w'", "^the flat gradient")):
            prepare(layout, value)


@pytest.mark.parametrize("kind", [ps.Client, ps.AsyncClient])
def test_what_belongs_to_a_client_is_not_pickled(kind: Any) -> None:
    """Pickling a client's model or worker for another process raises TypeError with a remedy."""
    client = kind("http://a:1")
    model = client.model("m")
    for held in (client, model, model.worker()):
        with pytest.raises(TypeError, match="in the other process"):
            pickle.dumps(held)


def test_arrays_for_gradients_are_not_pickled() -> None:
    """Pickling or copying arrays for gradients, whose memory is this process's own, raises TypeError with a remedy."""
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [2]}}}))
    grads = GradientArrays(layout, SameHost())
    for do in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"belong to this process.*dict"):
            do(grads)
    assert pickle.loads(pickle.dumps(dict(grads)))["w"].tolist() == [0.0, 0.0]


def test_a_worker_that_has_not_joined_shows_as_such() -> None:
    """The repr of a worker outside its block names its model and says that it has not joined."""
    assert repr(ps.AsyncClient("http://a:1").model("m").worker()) == "<AsyncWorker of 'm', not joined>"


def test_names_of_parameters_are_text() -> None:
    """A parameter name that is not a string is refused like any other invalid name."""
    with pytest.raises(ps.RequestError, match="parameter name 7 is not allowed"):
        model_document("m", {7: np.zeros(3)}, None, None, {})  # type: ignore[dict-item]


def test_set_takes_single_fields_and_builders() -> None:
    """A patch takes `lr=` into the optimizer, and optimizers and modes as builders or names; it must not be empty."""
    assert patch_document(None, ps.SSP(2), None, {}, {"lr": 0.5}) == {
        "optimizer": {"lr": 0.5},
        "consistency": ps.SSP(2).document(),
    }
    assert patch_document("adam", "ssp", None, {}, {"lr": 0.5}) == {
        "optimizer": {"name": "adam", "lr": 0.5},
        "consistency": {"mode": "ssp"},
    }
    with pytest.raises(ps.RequestError, match="nothing to set"):
        patch_document(None, None, None, {"checkpoint": None}, {})


@pytest.mark.parametrize("field", ["mode", "quorum", "staleness", "count", "lag", "min_workers"])
def test_set_takes_no_single_fields_of_the_consistency(field: str) -> None:
    """A single field of the consistency is refused with how to set it, not as an unknown field of the optimizer."""
    with pytest.raises(ps.RequestError, match=f"{field}: belongs to the consistency") as e:
        patch_document(None, None, None, {}, {field: 1})

    assert "set(consistency=" in e.value.hint


@pytest.mark.parametrize("field", ["ack", "partitions"])
def test_set_says_what_is_fixed_at_creation(field: str) -> None:
    """What a model keeps from its creation is refused as that, not as an unknown field of the optimizer."""
    with pytest.raises(ps.RequestError, match=f"{field}: is fixed when the model is created"):
        patch_document(None, None, None, {}, {field: 1})


def test_a_name_in_other_letters_is_meant() -> None:
    """A hint finds the name that differs only in upper and lower case, however short."""
    with pytest.raises(ps.RequestError) as e:
        model_document("m", {"w": (4,)}, None, "SSP", {})

    assert e.value.hint == "did you mean 'ssp'?"


@pytest.mark.parametrize(
    ("blocking", "awaited"), [(ps.Client, ps.AsyncClient), (ps.Model, AsyncModel), (ps.Worker, AsyncWorker)]
)
def test_asyncio_has_the_same_names_and_arguments(blocking: type, awaited: type) -> None:
    """Every public name of the blocking classes is in the asyncio ones, with the same parameters in the same order."""
    for name in (n for n in dir(blocking) if not n.startswith("_")):
        ours, theirs = getattr(awaited, name), getattr(blocking, name)
        if callable(theirs):
            assert list(signature(ours).parameters) == list(signature(theirs).parameters), name


@pytest.mark.parametrize(
    ("url", "env", "urls"),
    [
        (None, {}, ("http://127.0.0.1:8700",)),
        (None, {"PARAMSERVER_URL": "http://a:1/, b:2"}, ("http://a:1", "http://b:2")),
        ("https://x/ps/", {"PARAMSERVER_URL": "http://a:1"}, ("https://x/ps",)),
        ("http://bücher.example:1/é", {}, ("http://xn--bcher-kva.example:1/%C3%A9",)),
        ("ps", {}, ("http://ps",)),
    ],
)
def test_where_the_cluster_is(url: str | None, env: dict[str, str], urls: tuple[str, ...]) -> None:
    """The URL argument takes precedence over PARAMSERVER_URL, and that over the default; commas separate URLs."""
    assert urls_of(url, env) == urls


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:99999", "http://h:1,http://h:x", "http://:8700", "http://h:1?x=1",
        "http://192.168.1.300:8700", "http://a|b:1", "ftp://h:1", "http://[::x]:1", "http://u:p@h:1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("client", [ps.connect, ps.Client, ps.AsyncClient])
def test_a_url_where_nobody_can_be_is_refused(client: Any, url: str) -> None:
    """A URL with an invalid port or host, no host or a query is refused as invalid, not reported as unreachable."""
    with pytest.raises(ps.RequestError, match="is not a valid cluster URL"):
        client(url)


@pytest.mark.parametrize("name", ["", "..", "a/b", 5])
def test_a_name_that_no_model_can_have_is_refused_at_once(name: Any) -> None:
    """An invalid model name is refused at once, before it becomes part of a path."""
    with pytest.raises(ps.RequestError, match=r"model name .* is not allowed"):
        ps.AsyncClient("http://127.0.0.1:9").model(name)
    with pytest.raises(ps.RequestError, match=r"model name .* is not allowed"):
        ps.Client("http://127.0.0.1:9").model(name)


@pytest.mark.parametrize("kind", [ps.Client, ps.AsyncClient])
def test_a_worker_tells_its_client(kind: Any) -> None:
    """A worker leads to its client, and so to its model: all that the function of a run is given is the worker."""
    client = kind("http://127.0.0.1:9")
    assert client.model("m").worker().client is client


@pytest.mark.parametrize("codec", [5, b"int8", "int9"])
def test_a_codec_is_named(codec: Any) -> None:
    """A codec that is not a string, or not a known name, is refused with unknown_codec."""
    with refused_with("unknown_codec", ps.RequestError, match="is not known"):
        ps.AsyncClient("http://127.0.0.1:9").model("m", codec=codec)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"passes": 0}, "passes: must be an integer from 1"),
        ({"size": 5.5}, "size: must be an integer from 1 to .*, not 5.5"),
        ({"task_size": 0}, "task_size: must be an integer from 1"),
        ({"task_size": 1, "size": 1 << 40}, "task_size: 1 would make more than"),
        ({"size": None, "task_size": None, "ranges": [(0, 5.5)]}, "ranges: must be pairs"),
        ({"ranges": [(0, 5)]}, "either ranges=, or size= and task_size="),
    ],
)
def test_a_dataset_is_refused_in_the_words_of_who_adds_it(wrong: dict[str, Any], said: str) -> None:
    """The error for an invalid dataset names the caller's argument, and fractions are refused, not truncated."""
    options: Any = {"size": 10, "task_size": 2, "ranges": None, "uri": None, "passes": 1, **wrong}
    with pytest.raises(ps.RequestError, match=said):
        dataset_document("train", **options, assignment="dynamic")


@pytest.mark.parametrize("timeout", [None, -1, float("inf"), float("nan"), "3"])
def test_a_timeout_is_seconds(timeout: Any) -> None:
    """A timeout of a client or a call that is not a number of seconds is refused before anything is sent."""
    for client in (ps.connect, ps.Client, ps.AsyncClient):
        with pytest.raises(ps.RequestError, match="timeout is seconds"):
            client("http://127.0.0.1:9", timeout=timeout)
    if timeout is not None:
        with pytest.raises(ps.RequestError, match="timeout is seconds"):
            ps.AsyncClient("http://127.0.0.1:9").deadline(timeout)


@pytest.mark.parametrize("wrong", [{"shards": 0}, {"shards": "2"}, {"workers": -1}, {"timeout": "3"}])
def test_a_local_cluster_that_cannot_be_is_refused_before_it_is_started(wrong: Any) -> None:
    """The error for a wrong argument of `ps.local` names it; nothing is started."""
    with pytest.raises(ps.RequestError, match=f"^{next(iter(wrong))}"):
        ps.local(**wrong)


def test_a_local_cluster_without_a_temporary_folder_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no temporary folder can be made, `ps.local` raises Unavailable and names the way out."""
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(ps.Unavailable, match=r"'/nowhere.*state_dir="):
        ps.local()


def test_a_local_cluster_is_stopped_after_a_change_of_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`close` stops the cluster in a relative `state_dir`, wherever the process has changed to meanwhile."""
    told: list[str] = []

    def psctl(arguments: list[str], *_: Any) -> str:
        told.append(arguments[arguments.index("--state-dir") + 1])
        return '{"scheduler": "http://127.0.0.1:1"}'

    monkeypatch.setattr("paramserver.client.local._psctl", psctl)
    monkeypatch.chdir(tmp_path)
    client = ps.local(state_dir="mine")
    monkeypatch.chdir("/")
    client.close()
    assert told == [str(tmp_path / "mine")] * 2


def test_nobody_there_is_said_in_words_that_help() -> None:
    """The error of a refused connection names the address, the reason and the remedy."""
    with pytest.raises(ps.Unreachable) as e:
        ps.connect("http://127.0.0.1:9")

    assert (
        str(e.value) == "cannot reach http://127.0.0.1:9 (connection refused): is a cluster up? 'psctl up' starts one"
    )


def test_nobody_at_another_machine_is_not_to_be_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy for an address that is not of this machine's own is about what listens there, and the network."""
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ps.Unreachable) as e:
        ps.connect("http://0.0.0.0:9")

    assert e.value.detail == "cannot reach http://0.0.0.0:9 (connection refused)"
    assert "--host" in e.value.hint
    assert "firewall" in e.value.hint


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_pass_over_a_gradient_rounds_and_measures(dtype: str) -> None:
    """A gradient is sent as the nearest values of its dtype, with the norm of the original values in float64."""
    size = 200_000
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [size]}}, "partitions": 3}))
    values = np.random.default_rng(1).normal(size=size).astype(np.float32)
    gradient = prepare(layout, {"w": values}, dtype=dtype)
    body = np.empty(gradient.body_bytes(gradient.selection.parts), np.uint8)
    scan = Scan()

    gradient.write(gradient.selection.parts, body.data, scan)

    if dtype == "bfloat16":
        assert np.array_equal(body.view(np.uint16), f32_to_bf16(values))
    else:
        assert np.array_equal(body.view(dtype), values.astype(dtype))
    assert scan.norm == pytest.approx(float(np.linalg.norm(values.astype(np.float64))), rel=1e-12)
