// Choice among several cuDNN, over fakes of four versions. The choice holds for the process, and CTest runs each case
// with variables of its own.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <link.h>

#include <string>

#include "gpu_ops/base/attention.hpp"
#include "gpu_ops/ops/attention_cudnn.hpp"

namespace tandem::gpu {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

/// Folder of the libraries of a version ("9.14.0").
std::string folder(const std::string& version) {
  return TANDEM_FAKE_CUDNN_FOLDER "/" + version + "/lib/python3.12/site-packages/nvidia/cudnn/lib";
}

/// Path of the library that loading by its name gives, where one is loaded.
std::string loaded(const char* name) {
  void* const handle = ::dlopen(name, RTLD_NOW | RTLD_NOLOAD);
  link_map* map = nullptr;
  if (handle == nullptr || ::dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) return "nothing";
  return map->l_name;
}

/// Why attention is the plain one; "" where it is not.
std::string told() {
  std::string why;
  const auto attention = make_attention([&](const std::string& text) { why = text; });
  attention->forward(AttentionForward{}, nullptr, nullptr);
  return why;
}

TEST(CudnnSearch, DISABLED_GoesOnToTheFirstThatIsNewEnough) {
  EXPECT_THAT(attention_key(), StartsWith("cudnn 91900 "));
  for (const char* name : {"libcudnn.so.9", "libcudnn_graph.so.9", "libcudnn_heuristic.so.9"}) {
    EXPECT_EQ(loaded(name), folder("9.19.0") + "/" + name);
  }
}

TEST(CudnnSearch, DISABLED_TellsTheNewestWhereAllAreTooOld) {
  EXPECT_EQ(attention_key(), "plain");
  EXPECT_THAT(told(), HasSubstr(": " + folder("9.14.0") + "/libcudnn.so.9 is cuDNN 9.14.0, 9.18.0 or later is needed"));
  EXPECT_EQ(loaded("libcudnn.so.9"), "nothing");
  EXPECT_EQ(loaded("libcudnn_graph.so.9"), "nothing");
}

TEST(CudnnSearch, DISABLED_TakesNoneThatWouldRunOnPartsOfAnOlderOne) {
  // The program has taken an older one before.
  ASSERT_NE(::dlopen((folder("9.14.0") + "/libcudnn_graph.so.9").c_str(), RTLD_NOW), nullptr);
  EXPECT_THAT(told(), HasSubstr("is cuDNN 9.14.0, 9.18.0 or later is needed"));
}

}  // namespace
}  // namespace tandem::gpu
