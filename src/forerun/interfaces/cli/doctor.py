"""`forerun doctor`: the contents and the gaps of this installation."""

from __future__ import annotations

from forerun.interfaces.cli.program_options import AsJson
from forerun.interfaces.report.doctor import doctor_record, examine, print_doctor
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json


def doctor(as_json: AsJson = False) -> None:
    """Show versions, optional packages, caches and disk space, and the command that installs what is missing."""
    findings = examine()
    if as_json:
        print(to_json(doctor_record(findings)))
    else:
        print_doctor(console(), findings)
