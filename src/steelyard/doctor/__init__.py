"""Findings about a run: rules from its metrics so far and from declared facts; no torch.

`facts` has what a run declares of itself, `observation` what a rule reads of a step. The rules are
in `term_rules`, `answer_rules` and `run_rules`; `rule` says how long something must be wrong
before it is a finding. `examination` applies all of them.
"""

from steelyard.doctor.examination import Doctor, diagnose
from steelyard.doctor.facts import Facts
from steelyard.doctor.finding import Finding, FindingWarning

__all__ = ["Doctor", "Facts", "Finding", "FindingWarning", "diagnose"]
