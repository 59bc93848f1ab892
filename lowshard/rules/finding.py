"""Findings of a check, and the report that holds them.

The severity depends on the mode. "maxtext" is silent, or late, where MaxText is: what it accepts is no error there.
"strict" turns whatever silently changes the outcome into an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lowshard.argument import instance, items
from lowshard.document import Where
from lowshard.errors import RulesError
from lowshard.rules.axis_rule import Rule, rules_error

Mode = Literal["maxtext", "strict"]
Severity = Literal["error", "warning", "note"]

MODES: tuple[Mode, ...] = ("maxtext", "strict")

# code -> severity in maxtext mode, in strict mode
_SEVERITIES: dict[str, tuple[Severity, Severity]] = {
    # the file by itself
    "file-form": ("error", "error"),
    "key-unknown": ("note", "warning"),
    "key-misspelt": ("warning", "error"),
    "mesh-axes-form": ("error", "error"),
    "mesh-axis-repeated": ("error", "error"),
    "mesh-axis-unknown": ("warning", "warning"),
    "rules-form": ("error", "error"),
    "rules-empty": ("warning", "warning"),
    "rule-name-form": ("warning", "error"),
    "target-form": ("warning", "error"),
    "target-repeats-axis": ("warning", "error"),
    "rule-never-wins": ("warning", "warning"),
    "data-sharding-form": ("error", "error"),
    "data-sharding-flat": ("warning", "error"),
    "data-sharding-axis-absent": ("warning", "error"),
    "data-sharding-axis-inherited": ("note", "warning"),
    "override-form": ("warning", "error"),
    "context-sharding-ignored": ("note", "note"),
    "context-sharding-at-odds": ("warning", "error"),
    "context-sharding-refused": ("error", "error"),
    "extension-form": ("error", "error"),
    # the sizes asked for
    "mesh-size": ("error", "error"),
    "size-for-absent-axis": ("warning", "error"),
    "size-across-one-slice": ("warning", "error"),
    "two-fill-defaults": ("warning", "warning"),
    "pipeline-edit": ("note", "note"),
    # the tensors
    "axis-absent-weight": ("error", "error"),
    "axis-absent-perhaps-weight": ("warning", "error"),
    "axis-absent-other": ("warning", "warning"),
    "name-twice": ("error", "error"),
    "name-without-rule": ("warning", "warning"),
    "name-split-off": ("warning", "warning"),
    "name-all-blocked": ("warning", "warning"),
    "name-fell-back": ("note", "note"),
    "tensor-unmatched": ("warning", "warning"),
    "dim-indivisible": ("error", "error"),
    "names-beyond-rank": ("error", "error"),
    "memory-budget": ("error", "error"),
}


@dataclass(frozen=True)
class Finding:
    """One fact about a rule file, the requested sizes, or the tensors."""

    code: str
    """A stable word for programs."""
    severity: Severity
    text: str
    where: Where | None = None
    rule: Rule | str | None = None
    axis: str | None = None
    tensors: tuple[str, ...] = ()
    """The tensors it concerns, all of them."""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        named = f"rule {self.rule}: " if self.rule is not None else ""
        return f"{self.severity}: {place}{named}{self.text} [{self.code}]"

    def error(self) -> RulesError:
        """Return the finding as an error to raise."""
        return rules_error(self.text, self.where, rule=self.rule, axis=self.axis)

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "code": self.code,
            "severity": self.severity,
            "text": self.text,
            "path": self.where.path if self.where else None,
            "line": self.where.line if self.where else None,
            "column": self.where.column if self.where else None,
            "rule": None if self.rule is None else str(self.rule),
            "axis": self.axis,
            "tensors": list(self.tensors),
        }


@dataclass(frozen=True)
class CheckReport:
    """Every finding of a check, errors first."""

    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> CheckReport:
        """Return the report of findings in any order; equal ones count once."""
        rule = "a report is of findings, each a Finding"
        findings = [instance(f, Finding, rule, RulesError) for f in items(findings, rule, RulesError)]
        rank = {"error": 0, "warning": 1, "note": 2}
        return cls(tuple(sorted(dict.fromkeys(findings), key=lambda f: rank[f.severity])))

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that must be fixed."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that are probably not intended."""
        return tuple(f for f in self.findings if f.severity == "warning")

    @property
    def ok(self) -> bool:
        """True without errors."""
        return not self.errors

    def __str__(self) -> str:
        if not self.findings:
            return "nothing found"
        return "\n".join(map(str, self.findings))

    def raise_first(self) -> None:
        """Raise the first error, if there is one; its text says how many others there are.

        Raises:
            RulesError: the report holds an error.
        """
        errors = self.errors
        if not errors:
            return
        error = errors[0].error()
        if len(errors) > 1:
            rest = len(errors) - 1
            error.args = (f"{error} (and {rest} more error{'s' * (rest > 1)}: see `lowshard rules check`)",)
        raise error

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return {"ok": self.ok, "findings": [f.to_json() for f in self.findings]}


def find(
    code: str,
    mode: Mode,
    text: str,
    where: Where | None = None,
    *,
    rule: Rule | str | None = None,
    axis: str | None = None,
    tensors: Iterable[str] = (),
) -> Finding:
    """Return a finding with the severity that its code has in `mode`."""
    severity = _SEVERITIES[code][MODES.index(mode)]
    if where is None and isinstance(rule, Rule):
        where = rule.where
    return Finding(code, severity, text, where, rule, axis, tuple(tensors))
