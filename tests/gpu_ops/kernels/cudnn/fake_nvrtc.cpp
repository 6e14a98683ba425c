// The compiler that cuDNN needs, as far as its version is asked for, and whether it finds what it needs itself.
#include <dlfcn.h>

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 1;
  return 0;
}

/// Opens it by its bare name as the real one does, and as in Python's packages nothing says where: it has been loaded,
/// or is not found.
int nvrtcCompileProgram(void*, int, const char* const*) {
  constexpr int success = 0, builtin_operation_failure = 7;
  return ::dlopen("libnvrtc-builtins.so.13.1", RTLD_NOW | RTLD_NOLOAD) != nullptr ? success : builtin_operation_failure;
}
}
