# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Xids: which are the program's own, which are the GPU's. Source: NVIDIA's catalogue "XID Errors". Pure."""

from typing import Final

APPLICATION: Final = {
    13: "a fault of the graphics engine, mostly an access out of bounds in a kernel",
    31: "a memory page fault, mostly an illegal access of the program",
    43: "the program's channel was reset after a fault of its own",
    45: "the program's work was cleared away, mostly after it was killed or failed",
    68: "a fault of the video processor that the program caused",
    109: "a context switch took too long, mostly because of the program",
}
"""Code -> what it says. The program's own: the GPU is well."""

AFTERMATH: Final = {
    43: frozenset((13, 31, 68, 109)),
    45: frozenset((13, 31, 43, 68, 109)),
}
"""Code -> application codes that it follows as the driver cleans up: alone it is news, after them it is not."""
TEARDOWN: Final = 45
"""Comes from every GPU of a program that ends by force, whatever ended it, and on whichever GPU."""

HARDWARE: Final = {
    46: "the GPU stopped processing",
    48: "an uncorrectable memory error (double-bit ECC)",
    54: "auxiliary power is not connected",
    61: "an internal micro-controller halted",
    62: "an internal micro-controller halted",
    64: "a bad row could not be remapped, or a page not retired",
    69: "a fault of the graphics engine's class",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "a high rate of corrected memory errors",
    94: "an uncorrectable memory error, contained to the program",
    95: "an uncorrectable memory error, not contained",
    110: "a security fault",
    119: "the GPU's system processor does not answer",
    120: "an error of the GPU's system processor",
    121: "an error of the link between processor and GPU",
    123: "the power management unit does not answer",
    136: "a link training failed",
    137: "an NVLink fault, mostly from the peer",
    140: "an unrecovered memory error",
    143: "the GPU could not be initialised",
    144: "an NVLink error",
    145: "an NVLink error",
    146: "an NVLink error",
    147: "an NVLink error",
    148: "an NVLink error",
    149: "an NVLink error",
    150: "an NVLink error",
    154: "the GPU needs to be recovered: a reset, a drain or a reboot",
    155: "an NVLink's memory access failed",
    156: "a part of the GPU was retired",
    157: "a part of the GPU could not be retired",
}
"""Code -> what it says. 63 is left out: it records that a bad row *was* remapped, as it should."""

LOST: Final = frozenset(
    ("GPU_IS_LOST", "RESET_REQUIRED", "IRQ_ISSUE", "CORRUPTED_INFOROM", "INSUFFICIENT_POWER", "GPU_NOT_FOUND"),
)
"""NVML's errors about one GPU that mean hardware."""
