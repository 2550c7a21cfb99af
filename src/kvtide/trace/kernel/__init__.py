"""Capture of kernel events through tracefs."""

from kvtide.trace.kernel.capture import Capture, CaptureOptions
from kvtide.trace.kernel.tracefs import find_tracefs

__all__ = ["Capture", "CaptureOptions", "find_tracefs"]
