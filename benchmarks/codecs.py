"""Cost and loss of each codec: bytes on the wire, GB/s of float32, cosine, accuracy on handwritten digits.

    python -m benchmarks.codecs                        all codecs; training runs on a private cluster
    python -m benchmarks.codecs --steps 0              without training
    python -m benchmarks.codecs --codecs int8 topk:0.02+zstd --elements 1048576

Encoding is the work of a worker before it sends: checking for NaN, adding the error feedback, encoding, compressing.
Decoding is the work of a shard after receiving: undoing the second stage, checking, and adding the gradient to a sum,
block by block.  Both run on one thread, in partitions of 4 MiB; times are medians of `--repeats`.  A rate counts the
gradient's float32 bytes.  The cosine is between a gradient of normally distributed numbers and its decoded form.  The
accuracy is that of a model after `--steps` steps of one synchronous worker with batch size 64, the mean over `--seeds`.
"""

import argparse
import statistics
import sys
from typing import Any

import numpy as np
from benchmarks.machine import about
from benchmarks.meters import median_s

import paramserver as ps
from paramserver import kernels
from paramserver.client.encoding import Content, Encoded, Encoding, Feedback, draft_for, ready
from paramserver.client.gradients import Scan
from paramserver.codecs.codec import Codec
from paramserver.codecs.parts import check_content
from paramserver.codecs.stage import unpack
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.examples import digits
from paramserver.types import F32, AnyArray
from paramserver.wire.tensor import NUMPY_DTYPE

CODECS = (
    "fp32", "fp16", "bf16", "int8", "topk:0.01", "topk:0.1",
    "fp32+zstd", "fp32+lz4", "bf16+zstd", "int8+zstd", "int8+lz4", "topk:0.01+zstd",
)  # fmt: skip
PARTITION_ELEMENTS = 1 << 20


def bodies(content: Content) -> list[AnyArray]:
    """Return the bytes of each part as sent."""
    if isinstance(content, Encoded):
        return [content.parts[p.partition][0] for p in content.selection.parts]
    out = []
    if views := content.views(content.selection.parts, Scan(exact=False)):
        return [np.frombuffer(v, np.uint8) for v in views]  # sent from where it lies
    for part in content.selection.parts:
        body = np.empty(content.body_bytes([part]), np.uint8)
        content.write([part], body.data, Scan())
        out.append(body)
    return out


def receive(codec: Codec, content: Content, parts: list[AnyArray], out: F32) -> None:
    """Decode and check the parts as a shard does, into `out`."""
    for part, body in zip(content.selection.parts, parts, strict=True):
        data, size = body, part.stop - part.start
        if codec.stage is not None:
            assert isinstance(content, Encoded)
            data = unpack(codec.stage, body, content.parts[part.partition][1])
        if codec.per_partition:
            check_content(codec.coding, data, size)
        else:
            data = data.view(NUMPY_DTYPE[codec.coding])
        assert kernels.all_finite(data, codec.coding)
        kernels.mean([(data, codec.coding, 1.0, None)], 1.0, out[part.start : part.stop])


def measure(text: str, elements: int, repeats: int) -> dict[str, Any]:
    """Return bytes, rates and cosine of one codec."""
    codec = Codec.parse(text)
    partitions = max(1, elements // PARTITION_ELEMENTS)
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [elements]}}, "partitions": partitions}))
    gradient = np.random.default_rng(1).standard_normal(elements, np.float32)
    feedback = Feedback()

    def encode(memory: Feedback) -> tuple[Content, list[AnyArray]]:
        with draft_for(memory) as draft:
            content = ready(layout, 1, {"w": gradient}, Encoding(codec), draft)
        return content, bodies(content)

    content, parts = encode(Feedback())
    arrived = np.zeros(elements, np.float32)
    receive(codec, content, parts, arrived)
    a, b = gradient.astype(np.float64), arrived.astype(np.float64)
    total = np.zeros(elements, np.float32)
    return {
        "codec": text,
        "bytes": sum(p.size for p in parts) / (4 * elements),
        "encode": 4e-9 * elements / median_s(lambda: encode(feedback), repeats),
        "decode": 4e-9 * elements / median_s(lambda: receive(codec, content, parts, total), repeats),
        "cosine": float(a.dot(b) / np.sqrt(a.dot(a) * b.dot(b))),
    }


def accuracy(client: ps.Client, text: str, steps: int, seed: int) -> float:
    """Train with a codec for `steps` steps and return the fraction of test images classified correctly."""
    model = client.create_model("codec", digits.spec(), optimizer=ps.Adam(lr=1e-3), consistency=ps.Sync())
    rng = np.random.default_rng(seed)
    params = None
    with model.worker(codec=text) as worker:
        for _ in range(steps):
            params = worker.pull(out=params)
            _, grads = digits.loss_and_grads(params, *digits.batch(rng, 64))
            worker.step(grads)
        found = digits.accuracy(worker.pull())
    model.delete()
    return found


def main() -> None:
    """Measure the codecs given on the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--elements", type=int, default=8 << 20)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400, help="of each training; 0: none")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each codec")
    chosen = parser.parse_args()
    say(f"{' · '.join(f'{k} {v}' for k, v in about().items())}; {chosen.elements} elements\n\n")
    say("| codec | bytes of fp32 | encode GB/s | decode GB/s | cosine | accuracy |\n|---|--:|--:|--:|--:|--:|\n")
    rows = [measure(text, chosen.elements, chosen.repeats) for text in chosen.codecs]
    found: dict[str, str] = dict.fromkeys(chosen.codecs, "")
    if chosen.steps:
        with ps.local(shards=2) as client:
            for text in chosen.codecs:
                runs = [accuracy(client, text, chosen.steps, seed) for seed in range(chosen.seeds)]
                found[text] = f"{100 * statistics.mean(runs):.1f} %"
    for r in rows:
        rates = f"{r['encode']:.2f} | {r['decode']:.2f} | {r['cosine']:.5f}"
        say(f"| `{r['codec']}` | {100 * r['bytes']:.1f} % | {rates} | {found[r['codec']]} |\n")


def say(text: str) -> None:
    """Print and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
