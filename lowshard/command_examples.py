"""Lines to try, for the help of each command whose own text has none."""

from __future__ import annotations

_COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "broadcast", "reduce", "gather",
    "scatter", "send_recv",
)  # fmt: skip

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "lowshard": (
        ("lowshard doctor", "what is installed, and what to do about the rest"),
        ("lowshard demo --synthetic", "the main job on 4 ranks, without a download"),
        ("lowshard run -n 4 examples/all_reduce.py", "a program of yours on 4 ranks"),
        ("lowshard bench all_reduce --ranks 2", "how fast a collective is here"),
    ),
    "lowshard demo": (("lowshard demo --synthetic -n 2", "random weights on 2 ranks, no download"),),
    "lowshard selftest": (
        ("lowshard selftest", "everything, on a GPU where there is one"),
        ("lowshard selftest --device cpu -n 4 -o selftest", "on 4 ranks of the CPU, logs to selftest/"),
        ("lowshard selftest --only kernels,fold", "two steps alone"),
    ),
    "lowshard warmup": (("lowshard warmup", "after an installation without compiled code"),),
    "lowshard rules dump": (
        (
            "lowshard rules dump --rules ep-as-cp --devices 8 --ici expert=2 --logical logical_shardings.json -o -",
            "",
        ),
    ),
    "lowshard rules compare": (
        ("lowshard rules compare old.json new.json", ""),
        ("lowshard rules compare golden/ --rules ep-as-cp --devices 8 --ici expert=2", ""),
    ),
    "lowshard rules explain": (
        ("lowshard rules explain moe/wi --rules default --logical logical_shardings.json", ""),
    ),
    "lowshard rules check": (
        (
            "lowshard rules check --rules my.yml --devices 16 --logical logical_shardings.json",
            "",
        ),
    ),
    "lowshard solve": (
        ("lowshard solve mlp --mesh dp=2,tp=4 --budget 20MB --run", "an example, run on random shards"),
        ("lowshard solve graph.yaml --mesh dp=2,tp=4 --json", "a file, for programs"),
    ),
    "lowshard bench": (
        ("lowshard bench all_reduce --ranks 4 -b 8 -e 128M -f 2", "as all_reduce_perf -g 4 of nccl-tests"),
        ("lowshard bench all_reduce --ranks 2 --json found.json", "also every round's times"),
        ("lowshard bench mxfp8 --device cpu --size 64Mi", "kernels, as multiples of a memcpy"),
    ),
    **{
        f"lowshard bench {op}": (
            (f"lowshard bench {op} --ranks 2 -b 8 -e 64M -f 2", "2 ranks of this host, 8 bytes to 64 MiB"),
            (f"lowshard bench {op} --ranks 2 --compare-mpi", "beside mpi4py's"),
        )
        for op in _COLLECTIVES
    },
    "lowshard bench barrier": (("lowshard bench barrier --ranks 4 --compare-mpi", "beside mpi4py's"),),
    "lowshard bench redistribute": (
        ("lowshard bench redistribute --ranks 4 --size 64M", "every transition"),
        ("lowshard bench redistribute --only S0->S1", "one of them"),
    ),
    "lowshard bench fsdp": (("lowshard bench fsdp --ranks 2 --mode full,none --width 1024", ""),),
    "lowshard bench refit": (
        ("lowshard bench refit --size 64 --rounds 3", "a small model, quickly"),
        ("lowshard bench refit --model sample --to tp=1,dp=2", "dense, by what changed, and as others do it"),
    ),
    "lowshard bench publish": (
        ("lowshard bench publish --size 64M --rounds 5", "quickly"),
        ("lowshard bench publish --check", "exit code 1 where a limit is missed"),
    ),
    "lowshard bench plan": (("lowshard bench plan --rounds 1", ""),),
    "lowshard bench mxfp8": (
        ("lowshard bench mxfp8 --device cpu --size 64Mi --check", "exit code 1 where a limit is missed"),
        ("lowshard bench mxfp8 --only dequantize --json -", "some rows, as JSON"),
    ),
    "lowshard bench pack": (("lowshard bench pack --device cpu --size 100MB", ""),),
}
"""For a command, as its usage names it: what to write, and what that does."""


def examples_text(command: str) -> str:
    """Return the examples of a command as text for its help; "" where its own text has them."""
    lines = EXAMPLES.get(command, ())
    if not lines:
        return ""
    width = max((len(line) for line, what in lines if what), default=0)
    shown = [f"  {line:<{width}}  {what}".rstrip() for line, what in lines]
    return "\n".join(["", "examples:", *shown, ""])
