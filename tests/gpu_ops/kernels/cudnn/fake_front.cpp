// cuDNN's front as far as the search for it goes: it answers by its first part, which it opens by name and never
// closes.
#include <dlfcn.h>

#include <cstddef>

namespace {

std::size_t answer(const char* function) {
  static void* const part = ::dlopen("libcudnn_graph.so.9", RTLD_NOW);
  if (part == nullptr) return 0;
  return reinterpret_cast<std::size_t (*)()>(::dlsym(part, function))();
}

}  // namespace

extern "C" {

std::size_t cudnnGetVersion() { return answer("cudnnGetVersion"); }
std::size_t cudnnGetCudartVersion() { return answer("cudnnGetCudartVersion"); }
}
