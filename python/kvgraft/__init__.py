"""kvgraft: hand a running conversation from one language model to another."""

from kvgraft import _abi

_abi.check()
