"""Model specs: defaults, validation, patches, partitions, and error documents."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused_with

import paramserver as ps
from paramserver import limits
from paramserver.core.fields import merge_patch
from paramserver.core.layout import Layout
from paramserver.core.optimizer_spec import ScheduleSpec
from paramserver.core.spec import ModelSpec, differences
from paramserver.errors import CODES, NotFoundError, PsError, RequestError, from_document, problem


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.parse({"name": "demo", "params": {"w": {"shape": [64, 10]}, "b": {"shape": []}}} | changes)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"optimizer": {"name": "sgd", "lr": 0.9}}, ["optimizer.lr is 0.001, not 0.9"]),
        ({"optimizer": {"name": "adam"}}, ["optimizer.name is 'sgd', not 'adam'"]),
        (
            {"params": {"w": {"shape": [64, 9]}, "c": {"shape": [1]}}},
            ["params.w.shape is [64, 10], not [64, 9]", "params.b is there", "params.c is not there"],
        ),
        ({"ack": "journaled", "partitions": 2}, ["partitions is 1, not 2", "ack is 'applied', not 'journaled'"]),
    ],
)
def test_what_differs_between_two_specs_is_said(other: dict[str, Any], said: list[str]) -> None:
    """Each field that differs is named with both values; of two kinds of something only the kinds."""
    assert list(differences(spec().document(), spec(**other).document())) == said


def test_defaults_are_filled_in() -> None:
    """A spec of names and shapes gets float32, zeros, async, `applied` and a number of partitions by its size."""
    s = spec()

    assert s.params[0].dtype == "float32"
    assert s.params[0].init.kind == "zeros"
    assert s.consistency.mode == "async"
    assert s.ack == "applied"
    assert s.partitions == 1
    assert s.params[1].size == 1


@pytest.mark.parametrize(
    ("mib", "partitions"), [(0.5, 1), (0.6, 2), (1.5, 3), (1.6, 4), (16, 4), (16.1, 5), (100, 25), (65536, 4096)]
)
def test_a_model_is_cut_by_its_size(mib: float, partitions: int) -> None:
    """The default is partitions of 512 KiB, but at most four; beyond 16 MiB, of 4 MiB, but at most 4,096."""
    s = spec(params={"w": {"shape": [int(mib * (1 << 18))]}})

    assert s.partitions == partitions


FAR_FILE = {"kind": "file", "path": "/data/w.safetensors"}


def test_a_step_schedule_takes_torch_s_gamma() -> None:
    """A step schedule without a gamma decays as torch's and the Python client's do."""
    made = spec(optimizer={"schedule": {"kind": "step", "step_size": 3}})

    assert made.optimizer.schedule.gamma == ps.StepDecay(step_size=3).gamma == 0.1


def test_document_and_parse_are_inverse() -> None:
    """The document of a spec parses to the same spec."""
    s = spec(optimizer={"name": "adamw", "schedule": {"kind": "cosine", "t_max": 9}}, consistency={"mode": "sync"})

    assert ModelSpec.parse(s.document()) == s


@pytest.mark.parametrize(
    ("change", "where", "hint"),
    [
        ({"consistency": "sync"}, "consistency", 'such as {"mode": "sync"}'),
        ({"optimizer": "adam"}, "optimizer", 'such as {"name": "adam"'),
        ({"optimiser": {}}, "optimiser", "did you mean 'optimizer'?"),
        ({"optimizer": {"name": "adm"}}, "optimizer.name", "did you mean 'adam'?"),
        ({"optimizer": {"name": "sgd", "lr": float("nan")}}, "optimizer.lr", ""),
        ({"optimizer": {"name": "sgd", "lr": True}}, "optimizer.lr", ""),
        ({"optimizer": {"name": "sgd", "betas": [0.9, 0.99]}}, "optimizer.betas", "known fields"),
        ({"optimizer": {"name": "adam", "betas": [0.9]}}, "optimizer.betas", ""),
        ({"optimizer": {"schedule": {"kind": "exponential"}}}, "optimizer.schedule.gamma", ""),
        ({"consistency": {"mode": "sync", "quorum": 0}}, "consistency.quorum", ""),
        ({"consistency": {"mode": "async", "staleness": 3}}, "consistency.staleness", "known fields"),
        ({"params": {"w": {"shape": [0]}}}, "params.w.shape", ""),
        ({"params": {"w": {"shape": [2], "init": {"kind": "normal", "std": -1}}}}, "params.w.init.std", ""),
        ({"params": {"w": {"shape": [2], "init": {"kind": "uniform", "low": 2}}}}, "params.w.init.low", ""),
        ({"params": {"w": {"shape": [2], "init": {"kind": "file"}}}}, "params.w.init.path", "state directory"),
        ({"params": {"w": {"shape": [2], "init": FAR_FILE}}}, "params.w.init.path", "state directory"),
        ({"params": {"w": {}}}, "params.w.shape", "a list of positive integers"),
        ({"params": {}}, "params", ""),
        ({"partitions": 0}, "partitions", ""),
        ({"partitions": 642}, "partitions", ""),
        ({"name": "-x"}, None, "letters, digits"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], where: str | None, hint: str) -> None:
    """A wrong field is refused with its path, and with a hint where one helps."""
    with pytest.raises(RequestError) as caught:
        spec(**change)

    assert caught.value.status == 422
    assert caught.value.members.get("where") == where
    assert hint in caught.value.hint


def test_all_wrong_fields_are_listed_at_once() -> None:
    """Several wrong fields are listed in one error."""
    with pytest.raises(RequestError) as caught:
        spec(name="a b", optimizer={"name": "sgd", "lr": -1}, ack="maybe")

    assert [e.get("where") for e in caught.value.errors] == [None, "optimizer.lr", "ack"]


def test_a_spec_that_is_no_object_is_refused_as_a_whole() -> None:
    """A body that is no JSON object is named as the body, not as a field without a name."""
    with pytest.raises(RequestError, match="the body: must be an object, not list"):
        ModelSpec.parse([])


@pytest.mark.parametrize("ack", ["applied", "journaled", "fsynced"])
def test_the_acknowledgement_level_is_fixed_at_creation(ack: str) -> None:
    """Each ack level is accepted and kept, and no patch changes it."""
    made = spec(ack=ack)

    assert made.patched({"optimizer": {"lr": 0.5}}).document()["ack"] == ack
    with refused_with("invalid_field", RequestError):
        made.patched({"ack": "applied"})


def test_patch_changes_settings_and_keeps_the_rest() -> None:
    """A patch keeps what it does not name, such as `lr`; another mode starts from its own defaults, except `lag`."""
    s = spec(optimizer={"name": "sgd", "lr": 0.1})

    assert s.patched({"optimizer": {"lr": 0.05}}).optimizer.lr == 0.05
    ssp = s.patched({"consistency": {"mode": "ssp", "staleness": 2}})
    assert (ssp.consistency.mode, ssp.consistency.staleness, ssp.optimizer.lr) == ("ssp", 2, 0.1)
    assert ssp.patched({"optimizer": {"name": "adam"}}).optimizer.lr == 0.1
    ssp = ssp.patched({"consistency": {"min_workers": 3, "lag": "scale"}})
    assert (ssp.consistency.staleness, ssp.consistency.min_workers, ssp.consistency.lag) == (2, 3, "scale")
    sync = ssp.patched({"consistency": {"mode": "sync"}})
    assert (sync.consistency.min_workers, sync.consistency.lag) == (1, "scale")


def test_a_patch_of_one_kind_of_quorum_replaces_the_other() -> None:
    """A quorum takes effect though one by number was set, and the other way round; null leaves the other as it is."""

    def patched(made: ModelSpec, **rule: Any) -> tuple[float, int | None]:
        rules = made.patched({"consistency": rule}).consistency
        return rules.quorum, rules.quorum_count

    number, fraction = (spec(consistency={"mode": "sync"} | q) for q in ({"quorum_count": 1}, {"quorum": 0.75}))

    assert patched(number, quorum=1.0, late="fold") == (1.0, None)
    assert patched(number, quorum=0.5) == (0.5, None)
    assert patched(number, quorum=None) == patched(number, late="fold") == (1.0, 1)
    assert patched(fraction, quorum_count=2) == (1.0, 2)
    assert patched(fraction, quorum_count=None) == patched(fraction, late="fold") == (0.75, None)
    assert patched(number, quorum=0.5, quorum_count=None) == (0.5, None)


def test_a_quorum_of_both_kinds_is_refused_where_it_is_asked_for() -> None:
    """A fraction beside a number of workers would have no effect: a new model and a patch with both are refused.

    What is stored is read all the same, with both.
    """
    both = {"consistency": {"mode": "sync", "quorum": 0.75, "quorum_count": 2}}
    with refused_with("invalid_field", RequestError, match="quorum: .* quorum_count.* null"):
        spec().patched(both)
    with refused_with("invalid_field", RequestError, match="quorum: .* quorum_count.* null"):
        ModelSpec.asked(spec().document() | both)

    assert spec(**both).consistency.quorum == 0.75
    assert ModelSpec.asked(spec().document()) == spec()


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_another_kind_of_schedule_starts_from_its_own_defaults_except_the_warm_up(name: str) -> None:
    """A patch to another kind of schedule drops the fields of the present one, which the new one does not have."""
    s = spec(optimizer={"name": "sgd", "schedule": {"kind": "step", "step_size": 3, "gamma": 0.5, "warmup": 4}})

    changed = s.patched({"optimizer": {"name": name, "schedule": {"kind": "cosine", "t_max": 9}}}).optimizer.schedule
    assert changed == ScheduleSpec("cosine", t_max=9, warmup=4)
    assert s.patched({"optimizer": {"schedule": {"gamma": 0.1}}}).optimizer.schedule.step_size == 3


@pytest.mark.parametrize(
    "patch", [{"name": "other"}, {"partitions": 2}, {"params": {"w": {"shape": [2]}}}, {"params": {"b": None}}, []]
)
def test_patch_refuses_what_cannot_change(patch: Any) -> None:
    """A patch that changes names, shapes or partitions is refused."""
    with pytest.raises(RequestError):
        spec().patched(patch)


def test_patch_of_a_parameter_that_is_not_there_says_so() -> None:
    """A patch of an unknown parameter is refused with the nearest name, not for fields that a new one would need."""
    with refused_with("unknown_parameter", NotFoundError, match="did you mean 'w'"):
        spec().patched({"params": {"ww": {"lr_scale": 2.0}}})


def test_a_dimension_that_is_too_large_is_told_how_large_it_may_be() -> None:
    """A dimension that is too large is refused with the range that is allowed."""
    with pytest.raises(RequestError, match="integers from 1 to 68719476736"):
        spec(params={"w": {"shape": [1 << 40]}})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=8), c, max_size=3),
    max_leaves=8,
)
FIELDS = list(spec().document())


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), json_values, max_size=6))
def test_any_json_is_parsed_or_refused_as_the_callers_fault(data: dict[str, Any]) -> None:
    """Any JSON gives a RequestError, or a spec whose document parses to the same spec."""
    try:
        parsed = ModelSpec.parse({"name": "demo", "params": {"w": {"shape": [3]}}} | data)
    except RequestError:
        return
    assert ModelSpec.parse(parsed.document()) == parsed


@given(st.dictionaries(st.text(max_size=3), json_values, max_size=4))
def test_merging_a_document_into_itself_changes_nothing(doc: dict[str, Any]) -> None:
    """Merging a document without nulls into itself changes nothing."""
    once = merge_patch({}, doc)

    assert repr(merge_patch(once, once)) == repr(once)


shapes = st.lists(st.lists(st.integers(1, 40), max_size=2), min_size=1, max_size=6)


@given(shapes, st.integers(1, 64))
def test_partitions_cover_the_flat_vector_once(dims: list[list[int]], wanted: int) -> None:
    """Partitions are non-empty, contiguous, and their segments cover every parameter exactly once."""
    size = sum(ModelSpec.parse({"name": "m", "params": {"p": {"shape": d}}}).size for d in dims)
    params = {f"p{i}": {"shape": d} for i, d in enumerate(dims)}
    layout = Layout(ModelSpec.parse({"name": "m", "params": params, "partitions": min(wanted, size)}))

    assert all(hi > lo for lo, hi in layout.partitions())
    covered = [
        (s.param, i)
        for p, (lo, _) in enumerate(layout.partitions())
        for s in layout.segments[p]
        for i in range(lo + s.start, lo + s.stop)
    ]
    assert [i for _, i in covered] == list(range(size))
    for p, name in enumerate(params):
        lo, hi = layout.offsets[name]
        assert [i for q, i in covered if q == p] == list(range(lo, hi))


def test_large_models_get_partitions_of_bounded_size() -> None:
    """No default partition is larger than the bound on partitions."""
    s = ModelSpec.parse({"name": "big", "params": {"w": {"shape": [100_000, 1000]}}})

    assert max(hi - lo for lo, hi in Layout(s).partitions()) * 4 <= limits.PARTITION_BYTES_MAX


def test_problem_documents_round_trip() -> None:
    """A client raises from a problem document the same error that the node wrote into it."""
    for code in CODES:
        e = problem(code, "what happened", hint="what to do", map_epoch=7)
        back = from_document(e.document("r1"))
        assert (type(back), back.code, back.status, back.members) == (type(e), code, e.status, {"map_epoch": 7})


def test_unknown_codes_keep_their_class() -> None:
    """An unknown code, as of a newer server, is classified by its status."""
    assert from_document({"status": 418, "code": "teapot"}).code == "malformed"
    assert from_document({"status": 503, "code": "new"}).retryable
    assert isinstance(from_document({"status": 500}), PsError)


def test_a_patch_that_names_no_parameter_reads_none_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch of other settings keeps the parameters as they are, which may be 4,096, and reads none of them."""
    spec = ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4], "lr_scale": 0.5}, "b": {"shape": []}}})
    monkeypatch.setattr("paramserver.core.spec.ParamSpec", None)

    patched = spec.patched({"evaluate_every": 5, "optimizer": {"name": "adam"}})

    assert patched.params == spec.params
    assert (patched.evaluate_every, patched.optimizer.name) == (5, "adam")
