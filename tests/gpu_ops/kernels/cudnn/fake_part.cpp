// A part of cuDNN with its version, as a function and as data, and once loaded it stays: so does the real one.
#include <cstddef>

extern "C" {

extern const unsigned cudnn_graph_version;
const unsigned cudnn_graph_version = FAKE_MAJOR << 16 | FAKE_MINOR << 8 | FAKE_PATCH;

std::size_t cudnnGetVersion() { return FAKE_MAJOR * 10000 + FAKE_MINOR * 100 + FAKE_PATCH; }
std::size_t cudnnGetCudartVersion() { return 13000; }
}
