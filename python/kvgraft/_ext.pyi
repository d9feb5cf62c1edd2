import mlx.core as mx

_Table = tuple[mx.array, mx.array, bool]

def map_layer(
    sources: list[mx.array],
    weight: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    group_size: int,
    bits: int,
    bias: mx.array | None,
    heads: list[list[int]] | None,
    strip: list[_Table | None],
    rotate: _Table | None,
    dtype: mx.Dtype | None,
    composed: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array: ...
def path(
    sources: list[mx.array],
    weight: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    group_size: int,
    bits: int,
    bias: mx.array | None,
    heads: list[list[int]] | None,
    strip: list[_Table | None],
    rotate: _Table | None,
    dtype: mx.Dtype | None,
    stream: mx.Stream | mx.Device | None = None,
) -> str: ...
def set_num_threads(count: int) -> None: ...
def num_threads() -> int: ...
def cpu_isas() -> list[str]: ...
def cpu_isa() -> str: ...
def use_cpu_isa(name: str) -> None: ...
def all_finite(x: mx.array) -> bool: ...
def metal_status() -> str: ...
