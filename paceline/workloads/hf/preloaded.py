"""Imported by the fork server where the ranks' model is one of transformers, which takes a process
four seconds to import: so it does it once, and not each rank of each attempt."""

from contextlib import suppress

from paceline.errors import PacelineError
from paceline.workloads.hf.model import require_extra

with suppress(PacelineError):  # it is not installed: the plan says so
    require_extra("transformers.modeling_utils")
    require_extra("transformers.models.auto.modeling_auto")
