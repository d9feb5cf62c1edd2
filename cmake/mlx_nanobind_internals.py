"""Print the version of the nanobind internals that mlx.core was built with."""

import ctypes
import re

import mlx.core  # noqa: F401  registers its internals with the interpreter

api = ctypes.pythonapi
api.PyInterpreterState_Get.restype = ctypes.c_void_p
api.PyInterpreterState_GetDict.restype = ctypes.py_object
api.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
state = api.PyInterpreterState_GetDict(api.PyInterpreterState_Get())

# nanobind 3: __nb_internals_<platform>_a1_v22_mlx__
# nanobind 2: __nb_internals_v21_<platform>_mlx__
for key in state:
    found = re.fullmatch(r"__nb_internals_(?:.*_)?v(\d+)_.*mlx__", str(key))
    if found:
        print(found[1])
        break
else:
    raise SystemExit("mlx.core registered no nanobind internals of the domain 'mlx'.")
