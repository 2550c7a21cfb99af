"""Signatures of vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics, vllm 0.32.0; written by tools/make_stand_ins.py."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, NewType

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

@dataclass
class OffloadingConnectorStats(KVConnectorStats):
    def is_empty(self) -> bool:
        return not self.data
    def increase_counter(self, counter_name: str, counter_increase_value: int | float=1, labelvalues: tuple[str, ...]=()) -> None:
        self.data[counter_name] = self.data.get(counter_name, 0) + counter_increase_value
    def set_gauge(self, gauge_name: str, gauge_value: int | float, labelvalues: tuple[str, ...]=()) -> None:
        self.data[gauge_name] = gauge_value
