// A driver that takes every kernel that it is given and runs none: what cuDNN asks of libcuda.so.1 while it plans for a
// card that it has been told of.
#include <cstddef>

namespace {

int something;
constexpr int success = 0;

int give(void** made) {
  *made = &something;
  return success;
}

}  // namespace

extern "C" {

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return success;
}
int cuGetErrorString(int, const char** text) {
  *text = "of a fake";
  return success;
}
int cuGetErrorName(int, const char** text) {
  *text = "FAKE";
  return success;
}
int cuDeviceGetCount(int* count) {
  *count = 1;
  return success;
}
int cuDeviceGet(int* device, int) {
  *device = 0;
  return success;
}
int cuCtxGetCurrent(void** context) { return give(context); }
int cuCtxPopCurrent(void** context) { return give(context); }
int cuStreamGetCtx(void*, void** context) { return give(context); }

int cuLibraryLoadData(void** library, const void*, int*, void**, unsigned, int*, void**, unsigned) {
  return give(library);
}
int cuLibraryLoadFromFile(void** library, const char*, int*, void**, unsigned, int*, void**, unsigned) {
  return give(library);
}
int cuLibraryGetKernel(void** kernel, void*, const char*) { return give(kernel); }
int cuLibraryGetGlobal(void** data, std::size_t* bytes, void*, const char*) {
  *bytes = 8;
  return give(data);
}
int cuKernelGetFunction(void** function, void*) { return give(function); }
int cuFuncGetAttribute(int* value, int, void*) {
  *value = 0;
  return success;
}
int cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 0;
  return success;
}

// Asked for by name, and called by nobody who plans.
int cuLibraryUnload(void*) { return success; }
int cuFuncSetAttribute(void*, int, int) { return success; }
int cuKernelSetAttribute(int, int, void*, int) { return success; }
int cuCtxPushCurrent(void*) { return success; }
int cuCtxGetLimit(std::size_t*, int) { return success; }
int cuLinkCreate() { return success; }
int cuLinkAddData() { return success; }
int cuLinkComplete() { return success; }
int cuLinkDestroy() { return success; }
int cuLaunchKernel() { return success; }
int cuLaunchKernelEx() { return success; }
int cuLaunchCooperativeKernel() { return success; }
int cuOccupancyMaxPotentialClusterSize() { return success; }
}
