# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Advice: which setting of verl to change for a finding, from what, to what, why, and what it costs. Pure.

`advise(finding, context)` asks the advisors of the finding's reason. Each change was held against verl's own
constraints, names the key as the job's release spells it, and takes its size from the evidence; where the settings
cannot be seen, the advice says on what it depends.
"""

from .advisors import MAX_ADVICE, advise
from .context import Context, context_of

__all__ = ["MAX_ADVICE", "Context", "advise", "context_of"]
