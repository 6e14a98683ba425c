#!/usr/bin/env python3
"""Shows that check_dependencies.py can fail: plants one violation of each kind in a copy of the tree.

Usage: planted_violations.py ROOT

The copy must pass as it is; with each violation planted it must fail, and name the file and the rule. The check runs in this
process, which reads each file once, and first as a program.
"""
import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import check_dependencies
from planted_report import report

KEPT = {".hpp", ".h", ".cpp", ".cu", ".cuh", ".py", ".in"}
README = "README.md"
# The copy's READMEs name what is planted, so that each file breaks one rule alone.
PLANTED_ARE_NAMED = "\n`planted*`, `*/planted*`, `{braced,other}_planted.hpp`\n"

# file, text, rule that must be named (None: must pass)
PLANTED = [
    ("core/host/planted.hpp", '#include "offload/engine/engine.hpp"\n', "dependency"),
    ("core/numerics/planted.hpp", '#include "cpu_ops/kernels/gemm.hpp"\n', "dependency"),
    ("scheduler/plan/planted.cpp", '  #  include "offload/engine/engine.hpp"\n', "dependency"),
    ("cpu_ops/device/planted.cpp", '#include "models/gpt2.hpp"\n', "dependency"),
    ("gpu_ops/kernels/planted.cu", '#include "cpu_ops/kernels/gemm.hpp"\n', "dependency"),
    ("models/hf/planted.cpp", '#include "io/checkpoint.hpp"\n', "dependency"),
    ("data/planted.cpp", "#include <io/checkpoint.hpp>\n", "dependency"),
    ("io/planted.cpp", '#include "tandem/engine.hpp"\n', "dependency"),
    ("comm/planted.cpp", '#include "gpu_ops/device/native_stream.hpp"\n', "dependency"),
    ("comm/nccl/planted.cpp", '#include "gpu_ops/ops/cuda_ops.hpp"\n', "dependency"),
    ("comm/nccl/planted.cpp", '#include "gpu_ops/device/native_stream.hpp"\n', None),
    ("train/loop/planted.cpp", '#include "cpu_ops/device/host_device.hpp"\n', "dependency"),
    ("api/planted.cpp", '#include "train/config/config.hpp"\n', "dependency"),
    ("include/tandem/planted.hpp", '#include "models/gpt2.hpp"\n', "dependency"),
    ("python/planted.cpp", '#include "offload/engine/engine.hpp"\n', "dependency"),
    ("python/planted.cpp", '#include "tandem/planning.hpp"\n', None),
    ("python/tandem/unnamed.py", "", "named"),
    ("offload/engine/planted.cpp", '#include "tests/cpu_ops/host_device_testing.hpp"\n', "dependency"),
    ("core/base/planted.cpp", '#include "memory.hpp"\n', "dependency"),
    ("core/base/planted.cpp", '#include "../offload/engine.hpp"\n', "dependency"),
    ("io/planted.cpp", "// line\n" * 601, "length"),
    ("tests/core/planted.py", "# line\n" * 601, "length"),
    ("offload/engine/planted.hpp", "#pragma once\n#ifdef TANDEM_CUDA\n#endif\n", "conditional"),
    ("core/ops/planted.hpp", "#pragma once\n  # if 1\n#endif\n", "conditional"),
    ("include/tandem/planted.hpp", "#include <hwloc.h>\n", "public"),
    ("include/tandem/planted.hpp", "#include <cuda_runtime.h>\n", "public"),
    ("include/tandem/planted.hpp", "#include <oneapi/tbb/task_arena.h>\n", "public"),
    ("include/tandem/planted.hpp", '#include <oneapi/dnnl/dnnl.hpp>\n', "public"),
    ("scheduler/search/unnamed.hpp", "#pragma once\n", "named"),
    ("scheduler/plan/host.cpp", "// a word of the README, but no file's name there\n", "named"),
    ("gpu_ops/kernels/unnamed.hpp", "#pragma once\n", "named"),
    ("api/cuda/cuda_back.cpp", "// part of a name that is there\n", "named"),
    ("core/base/planted.hpp", '#include "core/memory/memory.hpp"\n', "part"),
    ("core/params/planted.cpp", '#include "core/ops/ops.hpp"\n', "part"),
    ("cpu_ops/kernels/planted.cpp", '#include "cpu_ops/device/host_ops.hpp"\n', "part"),
    ("gpu_ops/kernels/planted.cu", '#include "gpu_ops/ops/cuda_ops.hpp"\n', "part"),
    ("scheduler/tasks/planted.hpp", '#pragma once\n#include "scheduler/simulation/simulator.hpp"\n', "part"),
    ("models/config/planted.cpp", '#include "models/hf/hf_config.hpp"\n', "part"),
    ("train/setup/planted.cpp", '#include "train/runtime/loaded_model.hpp"\n', "part"),
    ("offload/engine/planted.cpp", '#include "scheduler/machine/profile.hpp"\n', "part"),
    ("offload/storage/planted.cpp", '#include "offload/engine/engine.hpp"\n', "part"),
    ("offload/state/planted.cpp", '#include "io/checkpoint.hpp"\n', "part"),
    ("io/planted.cpp", '#include "offload/engine/engine.hpp"\n', "dependency"),
    ("train/planted.cpp", "// beside the parts\n", "part"),
    # Right files must pass, or the check would prove nothing.
    ("io/planted.cpp", "// line\n" * 600, None),
    ("core/numerics/planted.hpp", "#pragma once\n#ifdef __CUDACC__\n#endif\n", None),
    ("train/runtime/planted.cpp", '#include "offload/engine/engine.hpp"\n#include "tandem/engine.hpp"\n', None),
    ("cli/common/planted.cpp", '#include "cpu_ops/device/host_device.hpp"\n', None),
    ("cpu_ops/kernels/planted.cpp", "#include <oneapi/dnnl/dnnl.hpp>\n/*\n#include \"train/config/config.hpp\"\n*/\n", None),
    ("cpu_ops/update/adam_unnamed.cpp", "// by a pattern\n", None),
    ("io/braced_planted.hpp", "#pragma once\n", None),
    ("io/safetensors.h", "#pragma once\n", None),
]


def check(root):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        code = check_dependencies.main([check_dependencies.__file__, str(root)])
    return code, said.getvalue()


def check_as_program(root):
    result = subprocess.run([sys.executable, check_dependencies.__file__, str(root)], capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


def copy_tree(source, target):
    """Source files and READMEs, also those not yet in version control; build folders stay behind."""
    for folder in sorted(source.iterdir()):
        if not folder.is_dir() or folder.name.startswith((".", "build")):
            continue
        for path in folder.rglob("*"):
            if path.is_file() and (path.suffix in KEPT or path.name == README):
                place = target / path.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)
    for readme in [*target.glob(f"*/{README}"), *target.glob(f"*/*/{README}")]:
        with readme.open("a", encoding="utf-8") as file:
            file.write(PLANTED_ARE_NAMED)


def try_planted(root, name, text, rule):
    """An explanation of what went wrong, or None."""
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    code, output = check(root)
    file.unlink()
    if rule is None:
        return None if code == 0 else f"refused what is right in {name}:\n{output}"
    named = any(line.startswith(f"{name}:") and f": {rule}: " in line for line in output.splitlines())
    return None if code == 1 and named else f"missed a violation of '{rule}' in {name}: ended with {code}\n{output}"


def try_transitive(root):
    """A library that reaches users through a header of a module."""
    inner = root / "core/base/planted_inner.hpp"
    inner.write_text("#pragma once\n#include <tbb/task_arena.h>\n", encoding="utf-8")
    outer = root / "include/tandem/planted.hpp"
    outer.parent.mkdir(parents=True, exist_ok=True)
    outer.write_text('#pragma once\n#include "core/base/planted_inner.hpp"\n', encoding="utf-8")
    code, output = check(root)
    inner.unlink()
    outer.unlink()
    found = code == 1 and "core/base/planted_inner.hpp:2: public: " in output
    return None if found else f"missed a library behind a public header: ended with {code}\n{output}"


def try_without_readme(root):
    """A module that says nothing of itself."""
    readme = root / "comm" / README
    text = readme.read_text(encoding="utf-8")
    readme.unlink()
    code, output = check(root)
    readme.write_text(text, encoding="utf-8")
    found = code == 1 and "comm/metrics_server.cpp:1: named: " in output
    return None if found else f"missed a module without a {README}: ended with {code}\n{output}"


def try_crowded(root):
    """A folder with one source file too many."""
    folder = root / "tests" / "planted"
    folder.mkdir()
    for i in range(31):
        (folder / f"planted{i}.cpp").write_text("// one of many\n", encoding="utf-8")
    code, output = check(root)
    shutil.rmtree(folder)
    found = code == 1 and "tests/planted/planted0.cpp:1: crowded: " in output
    return None if found else f"missed a folder of 31 files: ended with {code}\n{output}"


def try_part_without_readme(root):
    readme = root / "scheduler" / "machine" / README
    text = readme.read_text(encoding="utf-8")
    readme.unlink()
    code, output = check(root)
    readme.write_text(text, encoding="utf-8")
    found = code == 1 and "scheduler/machine:1: part: " in output
    return None if found else f"missed a part without a {README}: ended with {code}\n{output}"


def main(arguments):
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="tandem_structure_") as folder:
        root = Path(folder) / "tree"
        copy_tree(Path(arguments[1]).resolve(), root)
        code, output = check_as_program(root)
        if code != 0:
            print(f"the tree itself does not pass:\n{output}")
            return 1
        outcomes = [try_planted(root, *planted) for planted in PLANTED]
        outcomes += [try_transitive(root), try_without_readme(root), try_crowded(root), try_part_without_readme(root)]
        empty_code, _ = check_as_program(Path(folder) / "nothing")
    outcomes.append("passed where there is no tree at all" if empty_code == 0 else None)
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
