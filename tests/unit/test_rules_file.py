"""Rule files: every accepted form, every refused one with its place, merging, ready-made files, extensions."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import yaml
from support.recorded import MAXTEXT

from lowshard.rules import READY_MADE, RulesError, load_rules, make_rules, parse_rules
from lowshard.rules.loading import ready_made_text
from lowshard.rules.rules_check import SPLIT_OFF

HEAD = "mesh_axes: [x, y]\ndata_sharding: [[x]]\n"


def rules_of(text: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(r.name, r.axes) for r in parse_rules(text).logical_axis_rules]


# ---- forms


@pytest.mark.parametrize(
    ("target", "axes"),
    [
        ("'x'", ("x",)), ("x", ("x",)), ('["x"]', ("x",)), ("[x, y]", ("x", "y")), ("[y, x]", ("y", "x")),
        ("[]", ()), ("null", ()), ("~", ()), ("[x, y, ]", ("x", "y")), ("!!str x", ("x",)),
    ],
)  # fmt: skip
def test_a_target_is_an_axis_axes_nothing_or_null(target: str, axes: tuple[str, ...]) -> None:
    assert rules_of(f"{HEAD}logical_axis_rules:\n  - [a, {target}]") == [("a", axes)]


def test_flow_lists_comments_quotes_anchors_and_merge_keys_are_read() -> None:
    text = """
    # a comment
    defaults: &defaults {mesh_axes: [x, y], data_sharding: [[x]]}
    <<: *defaults
    logical_axis_rules: [
        # one rule
        ['a', ['x']],  # with a comment
        ["a", &both [x, y]],
        [b, *both],
    ]
    """
    rules = parse_rules(text)
    assert rules.mesh_axes == ("x", "y")
    assert [(r.name, r.axes) for r in rules.logical_axis_rules] == [
        ("a", ("x",)), ("a", ("x", "y")), ("b", ("x", "y")),
    ]  # fmt: skip


def test_a_rule_knows_its_line_and_column() -> None:
    rules = parse_rules(f"{HEAD}logical_axis_rules: [\n  ['a', []],\n     [b, x], ['c', [x]]]\n", "my.yml")
    assert [str(r.where) for r in rules.logical_axis_rules] == ["my.yml:4:3", "my.yml:5:6", "my.yml:5:14"]
    assert str(rules.place("mesh_axes")) == "my.yml:1:1"


def test_a_rule_set_is_a_value() -> None:
    text = f"{HEAD}logical_axis_rules:\n  - [a, x]"
    one, two = parse_rules(text), parse_rules(text)
    one.resolve(("a",))
    assert one == two
    assert hash(one) == hash(two)
    assert one != parse_rules(f"{HEAD}logical_axis_rules:\n  - [a, y]")


# ---- what is refused: text, message, line, axis; "late" where only strict refuses the file by itself

AXES = "mesh_axes: [x, y]\n"
RULE = AXES + "logical_axis_rules:\n- "
WRONG: list[tuple[str, str, str, int, str | None]] = [
    ("always", "mesh_axes: x", "a list", 1, "x"),
    ("always", "mesh_axes: [x, 3]", "a number", 1, "3"),
    ("always", "mesh_axes:\n- x\n- no", "a truth value", 3, "no"),
    ("always", "mesh_axes:\n- x\n- y\n- x", "twice", 4, "x"),
    ("always", AXES + "logical_axis_rules: {a: x}", "a list of rules", 2, None),
    ("always", RULE + "[a]", "1 item", 3, None),
    ("always", RULE + "[a, x]\n- [a, x, y]", "3 items", 4, None),
    ("always", AXES + "data_sharding: {x: y}", "data_sharding is a list", 2, None),
    ("always", RULE + "[activation_length, [x]]", "context or expert", 3, "x"),
    ("late", RULE + "[a, [[x]]]", "holds a list", 3, None),
    ("late", RULE + "[a, {x: y}]", "a map", 3, None),
    ("late", RULE + "[a, off]", "a truth value", 3, None),
    ("late", RULE + "[a, [x, y, x]]", "twice", 3, "x"),
    ("late", RULE + "[7, x]", "a rule's name", 3, None),
    ("late", AXES + "data_sharding: [x, y]", "flat list", 2, None),
    ("late", AXES + "data_sharding: [[x, z]]", "which mesh_axes", 2, "z"),
    ("late", AXES + "logical_axes_rules: []", "did you mean logical_axis_rules", 2, None),
    ("late", AXES + "context_sharding: expert", "ignores it", 2, "expert"),
    ("always", AXES + "lowshard: {layer: []}", "keys are", 2, None),
    ("always", AXES + "lowshard: {layers: 7}", "layers is a list", 2, None),
    ("always", AXES + "lowshard: {parameters: [[a, b]]}", "parameters is a list", 2, None),
    ("always", AXES + "lowshard: {memory_budget_bytes_per_device: -1}", "a number > 0", 2, None),
    ("always", AXES + "mesh_axes: [y]", "stands twice", 2, None),
    ("always", "- a", "a rule file is a map", 1, None),
    ("always", "a: [", "not YAML", 1, None),
    ("always", "a: &a [*a]", "inside its own anchor|no YAML", 1, None),
    ("always", "---\na: 1\n---\nb: 2", "another document", 3, None),
    ("always", "a: !!python/object:os.system x", "the tag", 1, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("when", "text", "message", "line", "axis"), WRONG, ids=[f"{w[1]}"[-40:] for w in WRONG]
)
def test_a_wrong_file_is_an_error_with_its_place(
    when: str, text: str, message: str, line: int, axis: str | None
) -> None:
    with pytest.raises(RulesError, match=message) as found:
        parse_rules(text, "some/file.yml", mode="strict")
    error = found.value
    assert error.path == "some/file.yml"
    assert error.line is not None
    assert abs(error.line - line) <= (1 if "not YAML" in str(error) else 0)
    assert str(error).startswith(f"some/file.yml:{error.line}:{error.column}: ")
    assert axis is None or error.axis == axis
    if when == "late":
        parse_rules(text, mode="maxtext")
    else:
        with pytest.raises(RulesError):
            parse_rules(text, mode="maxtext")


def test_a_broken_target_fails_where_it_wins_and_nowhere_else() -> None:
    rules = parse_rules(f"{HEAD}logical_axis_rules:\n- [a, [[x]]]\n- [b, [x, x]]\n- [c, x]", "f.yml")
    assert rules.resolve(("c",)) == ("x",)
    with pytest.raises(RulesError, match=r"f\.yml:4:3: rule \[a, \[x\]\]: a target is an axis name") as found:
        rules.resolve(("a",))
    assert found.value.line == 4
    mesh = rules.mesh(4, ici={"x": 2, "y": 2})
    with pytest.raises(
        RulesError, match=r"f\.yml:5:3: rule \[b, \[x, x\]\]: the target names the axis 'x' twice"
    ):
        rules.layout(mesh, ("b",), (8,))
    assert rules.layout(mesh, ("c",), (8,)).spec == ("x",)


def test_an_error_survives_pickling_with_its_facts() -> None:
    with pytest.raises(RulesError) as found:
        parse_rules("mesh_axes: x", "f.yml")
    again = pickle.loads(pickle.dumps(found.value))
    assert (str(again), again.path, again.line, again.axis) == (str(found.value), "f.yml", 1, "x")


@pytest.mark.parametrize("source", ["no-such-rules", "none.yml", "a\0b", "/"])
def test_a_file_that_cannot_be_read_names_what_there_is(source: str) -> None:
    with pytest.raises(RulesError, match=r"pure-fsdp, ep-as-cp, cp-as-ep, pipeline-large-moe"):
        load_rules(source)


def test_a_file_that_is_no_text_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "r.yml"
    path.write_bytes(b"mesh_axes: [x]\n\xff\xfe\n")
    with pytest.raises(RulesError, match=r"r\.yml:2: a rule file is UTF-8"):
        load_rules(path)


# ---- merging


def test_a_key_of_a_rule_file_replaces_the_base_s_whole() -> None:
    base = load_rules("default")
    only_rules = parse_rules("logical_axis_rules:\n- [embed, fsdp]")
    assert only_rules.mesh_axes == base.mesh_axes
    assert len(only_rules.mesh_axes) == 12
    assert only_rules.data_sharding == base.data_sharding
    assert only_rules.resolve(("mlp",)) == (None,)
    for empty in ("", "# nothing\n", "null"):
        rules = parse_rules(empty)
        assert (rules.mesh_axes, rules.logical_axis_rules) == (base.mesh_axes, base.logical_axis_rules)
    assert str(rules.place("mesh_axes")).startswith("ready/default.yml:")


def test_a_base_can_be_a_file_a_rule_set_or_nothing() -> None:
    base = make_rules(["p", "q"], [("a", "p")])
    assert parse_rules("logical_axis_rules:\n- [a, q]", base=base).mesh_axes == ("p", "q")
    assert parse_rules("mesh_axes: [fsdp]", base="ep-as-cp").resolve(("exp",)) == ("expert",)
    with pytest.raises(RulesError, match="lacks mesh_axes, and there is no base"):
        parse_rules("logical_axis_rules: []", base=None)


def test_merged_by_name_new_rules_go_to_the_end_and_lose_their_priority() -> None:
    base = load_rules("default")
    order = [r.name for r in base.logical_axis_rules]
    assert order.index("mlp") < order.index("embed")
    over = parse_rules("logical_axis_rules:\n- [mlp, [fsdp_transpose, tensor]]", merge="names")
    order = [r.name for r in over.logical_axis_rules]
    assert order.index("mlp") > order.index("embed")
    assert order[-1] == "mlp"
    assert base.resolve(("embed", "mlp"))[1] is not None
    assert over.resolve(("embed", "mlp"))[1] is None  # embed now takes fsdp_transpose first
    again = base.with_rules([("mlp", ["fsdp_transpose", "tensor"])])
    assert [(r.name, r.axes) for r in over.logical_axis_rules] == [
        (r.name, r.axes) for r in again.logical_axis_rules
    ]


def test_every_rule_of_an_overridden_name_goes() -> None:
    base = load_rules("default")
    over = base.with_rules([("embed", "tensor"), ("new", None)])
    assert [r.axes for r in over.logical_axis_rules if r.name == "embed"] == [("tensor",)]
    assert len(over.logical_axis_rules) == 82 - 2 + 2
    assert over.logical_axis_rules[-1].name == "new"


def test_override_drops_all_other_rules_and_none_at_all_is_told() -> None:
    text = "override_logical_axis_rules: true\nlogical_axis_rules:\n- [a, fsdp]"
    assert rules_names(parse_rules(text, merge="names")) == ["a"]
    bare = parse_rules("override_logical_axis_rules: true", merge="names")
    assert bare.logical_axis_rules == ()
    assert [f.code for f in bare.check().warnings] == ["rules-empty"]
    assert rules_names(load_rules("default").with_rules([("a", [])], replace_all=True)) == ["a"]


def test_override_is_read_as_maxtext_s_settings_are_and_nothing_else_counts_as_false() -> None:
    rules = "logical_axis_rules: [[a, fsdp]]\noverride_logical_axis_rules: "
    for value, replaces in (("1", True), ("'true'", True), ("ON", True), ("0", False), ("n", False)):
        merged = rules_names(parse_rules(f"{rules}{value}", merge="names"))
        assert (merged == ["a"]) == replaces, value
    with pytest.raises(RulesError, match=r"^<text>:2:\d+: override_logical_axis_rules"):
        parse_rules(f"{rules}maybe", merge="names")
    quiet = parse_rules(f"{rules}maybe")  # a rule file's own key, which MaxText does not look at
    assert rules_names(quiet) == ["a"]
    assert [f.code for f in quiet.findings] == ["override-form"]


def rules_names(rules: object) -> list[str]:
    return [r.name for r in rules.logical_axis_rules]  # type: ignore[attr-defined]


def test_rules_of_evaluation_keep_the_mesh_of_training() -> None:
    train, evaluate = load_rules("pure-fsdp"), load_rules("ep-as-cp")
    both = train.for_eval(evaluate)
    assert both.mesh_axes == ("fsdp",)
    assert both.logical_axis_rules == evaluate.logical_axis_rules
    found = both.check({"w": (("exp",), (8,))}, devices=8)
    assert {"axis-absent-weight", "axis-absent-other"} <= {f.code for f in found.findings}


def test_errors_of_evaluation_name_the_file_that_its_rules_are_of() -> None:
    train = parse_rules(f"{HEAD}logical_axis_rules: [[a, x]]", "train.yml", mode="strict")
    evaluate = parse_rules(f"\n{HEAD}logical_axis_rules: [[b, x]]", "eval.yml", mode="strict")
    with pytest.raises(RulesError, match=r"^eval\.yml:4:1: no rule is for"):
        train.for_eval(evaluate).resolve(("gone",))
    with pytest.raises(RulesError, match=r"^no rule is for"):
        train.for_eval(make_rules(["x"], [("b", "x")])).resolve(("gone",))


# ---- data and context


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "context"), ("context_sharding: context\n", "context"),
        ("logical_axis_rules:\n- [activation_length, [expert, x]]", "expert"),
        ("logical_axis_rules:\n- [activation_length, expert]\n- [activation_length, context]", "expert"),
        ("context_sharding: context\nlogical_axis_rules:\n- [activation_length, [expert]]", "expert"),
        ("context_sharding: expert\nlogical_axis_rules:\n- [other, [expert]]", "context"),
        ("context_sharding: expert\nlogical_axis_rules:\n- [activation_length, []]", "context"),
    ],
)  # fmt: skip
def test_context_sharding_follows_from_the_rules_and_not_from_its_key(text: str, expected: str) -> None:
    assert parse_rules(f"mesh_axes: [x, expert, context]\n{text}").context_sharding == expected


def test_a_batch_is_laid_out_by_data_sharding() -> None:
    rules = load_rules("ep-as-cp")
    mesh = rules.mesh(8, ici={"fsdp": -1, "expert": 2})
    layout = rules.data_layout(mesh, (16, 128))
    assert layout.spec == (("data", "stage", "fsdp", "expert"), None)
    assert [layout.box(r)[0] for r in range(8)] == [(2 * r, 2 * r + 2) for r in range(8)]
    flat = parse_rules("mesh_axes: [data, fsdp]\ndata_sharding: [data, fsdp]", mode="maxtext")
    assert flat.data_layout(flat.mesh(4), (4, 4)).spec == ("data", "fsdp")
    assert flat.data_layout(flat.mesh(4), (4,)).spec == ("data",)
    absent = parse_rules("mesh_axes: [data, fsdp]\ndata_sharding: [[data, tensor]]", "d.yml")
    with pytest.raises(RulesError, match=r"d\.yml:2:1: data_sharding: .*no axis 'tensor'") as found:
        absent.data_layout(absent.mesh(4), (4,))
    assert found.value.axis == "tensor"


# ---- ready-made files


ORIGINALS = sorted(path.stem for path in (MAXTEXT / "rules").iterdir())


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_ready_made_file_means_what_maxtext_s_file_means(name: str) -> None:
    original = MAXTEXT / "rules" / f"{name}.yml"
    ours, theirs = load_rules(name, mode="strict"), load_rules(original, mode="strict")
    known = {r.name for r in theirs.logical_axis_rules}  # of a commit before some names
    assert {r.name for r in ours.logical_axis_rules} - known <= {*SPLIT_OFF, "segment_ids_batch"}
    assert [(r.name, r.axes) for r in ours.logical_axis_rules if r.name in known] == [
        (r.name, r.axes) for r in theirs.logical_axis_rules
    ]
    assert ours.mesh_axes == theirs.mesh_axes
    assert ours.data_sharding == theirs.data_sharding
    assert not {line for line in ready_made_text(name).splitlines() if line.lstrip().startswith("#")} & {
        line for line in original.read_text().splitlines() if line.lstrip().startswith("#")
    }


@pytest.mark.parametrize("name", READY_MADE)
def test_our_reading_is_pyyaml_s(name: str) -> None:
    plain = yaml.safe_load(ready_made_text(name))
    rules = load_rules(name)
    assert [r.name for r in rules.logical_axis_rules] == [n for n, _ in plain["logical_axis_rules"]]
    assert [list(r.axes) for r in rules.logical_axis_rules] == [t for _, t in plain["logical_axis_rules"]]
    assert list(rules.mesh_axes) == plain["mesh_axes"]
    assert [list(d) for d in rules.data_sharding] == plain["data_sharding"]
    assert {f.code for f in rules.check().findings} <= {"axis-absent-other"}
    assert rules.file_findings() == ()


@pytest.mark.parametrize("name", [n for n in READY_MADE if not n.startswith("fsdp-as-dp")])
def test_names_that_were_split_off_are_sharded_as_before(name: str) -> None:
    rules = load_rules(name)
    for new in (("embed_attn", "q_heads"), ("embed_router", None), ("embed_shared", "mlp_shared")):
        for names in (new, new[::-1]):
            assert rules.resolve(names) == rules.resolve([SPLIT_OFF.get(n, n) for n in names])  # type: ignore[arg-type]


# ---- from code


def test_rules_made_in_code() -> None:
    rules = make_rules(["dp", "tp"], [("embed", None), ("mlp", ["tp"]), ("batch", ("dp",))])
    mesh = rules.mesh(8, ici={"dp": 2, "tp": 4})
    assert rules.layout(mesh, ("embed", "mlp"), (6, 8), "bf16").local_shape(3) == (6, 2)
    for axes in ("dp", [], ["dp", "dp"], ["d p"], [3]):
        with pytest.raises(RulesError, match="mesh"):
            make_rules(axes, [])  # type: ignore[arg-type]
    for pair in ("ab", ("a",), ("a", 3), ("a", ["x", 3]), (3, "x"), ("a", [[]])):
        with pytest.raises(RulesError, match="a rule is a pair"):
            make_rules(["x"], [pair])  # type: ignore[list-item]
    for data in ([[3]], [[None]], [["x", ""]]):
        with pytest.raises(RulesError, match="data_sharding is a sequence"):
            make_rules(["x"], [], data_sharding=data)  # type: ignore[arg-type]


# ---- our extensions

OURS = """
mesh_axes: [fsdp, expert]
data_sharding: [[fsdp]]
logical_axis_rules:
  - [embed, [fsdp, expert]]
  - [mlp, []]
lowshard:
  memory_budget_bytes_per_device: 80e9
  layers:
    - match: "*moe*"
      logical_axis_rules:
        - [embed, [fsdp]]
        - [mlp, expert]
    - {match: "*.head", replace: true, logical_axis_rules: [[vocab, expert]]}
  parameters:
    - ["*.up.weight", [mlp, embed]]
    - ["*.bias", [null]]
"""


def test_an_axis_plays_another_role_in_some_layers() -> None:
    parse_rules(OURS, mode="strict")  # has no error
    rules = parse_rules(OURS)
    assert rules.resolve(("embed", "mlp")) == (("fsdp", "expert"), None)
    assert rules.resolve(("embed", "mlp"), parameter="l3.moe.up") == ("fsdp", "expert")
    assert rules.resolve(("embed", "mlp"), parameter="l3.dense.up") == (("fsdp", "expert"), None)
    assert rules.resolve(("embed", "vocab"), parameter="the.head") == (None, "expert")
    mesh = rules.mesh(8, ici={"fsdp": 4, "expert": 2})
    assert mesh.memory_budget_bytes_per_device == 80e9
    assert rules.layout(mesh, ("embed", "mlp"), (8, 8), parameter="moe.w").spec == ("fsdp", "expert")


def test_maxtext_reads_a_file_with_our_extensions_as_one_without() -> None:
    data = yaml.safe_load(OURS)
    del data["lowshard"]
    plain = parse_rules(yaml.safe_dump(data, default_flow_style=None))
    ours = parse_rules(OURS)
    assert [(r.name, r.axes) for r in ours.logical_axis_rules] == [
        (r.name, r.axes) for r in plain.logical_axis_rules
    ]


@pytest.mark.parametrize(
    ("pattern", "name", "hit"),
    [
        ("*", "", True), ("a*", "abc", True), ("*c", "abc", True), ("*b*", "abc", True), ("a?c", "abc", True),
        ("a", "abc", False), ("b*", "abc", False), ("*.w", "x/y.z.w", True), ("a*b*c", "a-b-b-c", True),
        ("a*b*c", "a-c-b", False), ("[a]", "a", False), ("a.c", "abc", False), ("a*a", "a", False),
        ("*x\ny", "ax\ny", True),
    ],
)  # fmt: skip
def test_patterns_match_whole_names(pattern: str, name: str, hit: bool) -> None:
    from lowshard.rules.extension import matches

    assert matches(pattern, name) is hit
