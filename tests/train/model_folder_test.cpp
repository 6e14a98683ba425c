// Names that models are asked for by, and what lies in a folder in place of safetensors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/base/error.hpp"
#include "train/hf/model_folder.hpp"
#include "train/hf/model_names.hpp"
#include "train/hf/model_source.hpp"
#include "train/hf/tokenizer_files.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ModelFolder : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directories(root_); }
  void TearDown() override { fs::remove_all(root_); }
  void write(const fs::path& name, const std::string& content = "x") const {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name, std::ios::binary) << content;
  }
  const fs::path root_ = fs::path(::testing::TempDir()) / ("tandem_model_folder_" + std::to_string(::getpid()));
};

TEST(ModelNames, TheNearestShapesComeFirst) {
  EXPECT_EQ(nearest_shapes("GPT-2").front(), "gpt2");
  EXPECT_EQ(nearest_shapes("lama3.2-1b").front(), "llama3.2-1b");
  EXPECT_EQ(nearest_shapes("tiny_llama").front(), "tiny-llama");
  EXPECT_THAT(nearest_shapes("something else"), IsEmpty());
  EXPECT_THAT(nearest_shapes(""), IsEmpty());
  EXPECT_LE(nearest_shapes("qwen").size(), 3u);
}

TEST(ModelNames, OfTheHubHaveAnOwnerAndAName) {
  for (const char* name : {"org/name", "meta-llama/Llama-3.2-1B", "a/b_c.d"}) EXPECT_TRUE(is_hub_name(name)) << name;
  for (const char* name : {"", "name", "/name", "org/", "a/b/c", "./a", "../a", "a/.b", "a/b c", "~/a"}) {
    EXPECT_FALSE(is_hub_name(name)) << name;
  }
}

TEST_F(ModelFolder, TheHubsCacheIsWhereItsVariablesSay) {
  ::setenv("HF_HOME", "/h", 1);
  EXPECT_EQ(hub_cache(), "/h/hub");
  ::setenv("HF_HUB_CACHE", root_.c_str(), 1);
  EXPECT_EQ(hub_cache(), root_);
  EXPECT_EQ(cached_snapshot("a/b"), std::nullopt);
  write("models--a--b/refs/main", "12ab\n");
  EXPECT_EQ(cached_snapshot("a/b"), std::nullopt) << "its snapshot has gone";
  write("models--a--b/snapshots/12ab/config.json");
  EXPECT_EQ(cached_snapshot("a/b"), root_ / "models--a--b/snapshots/12ab");
  write("models--a--b/refs/main", "../../elsewhere");
  fs::create_directories(root_ / "elsewhere");
  EXPECT_EQ(cached_snapshot("a/b"), std::nullopt);
  ::unsetenv("HF_HUB_CACHE");
  ::unsetenv("HF_HOME");
  ::setenv("XDG_CACHE_HOME", "/c", 1);
  EXPECT_EQ(hub_cache(), "/c/huggingface/hub");
  ::unsetenv("XDG_CACHE_HOME");
}

TEST_F(ModelFolder, WeightsSayMoreThanTheStateOfATrainer) {
  EXPECT_FALSE(foreign_weights_in(root_));
  for (const char* name : {"config.json", "tokenizer.json", "train.bin", "README.md", "merges.txt"}) write(name);
  EXPECT_FALSE(foreign_weights_in(root_));
  write("optimizer.pt");
  EXPECT_EQ(foreign_weights_in(root_)->file, "optimizer.pt");
  write("pytorch_model.bin");
  EXPECT_EQ(foreign_weights_in(root_)->file, "pytorch_model.bin");
  EXPECT_THAT(foreign_weights_in(root_)->advice, HasSubstr(root_.string() + "-safetensors"));
  write("pytorch_model_fsdp_0/__0_0.distcp");
  EXPECT_EQ(foreign_weights_in(root_)->file, "pytorch_model_fsdp_0/__0_0.distcp");
}

TEST_F(ModelFolder, NamedTemplatesLieInAFolderOfTheirOwn) {
  write("tokenizer.json");
  write("additional_chat_templates/rag.jinja");
  write("additional_chat_templates/notes.txt");
  const std::string name = "additional_chat_templates.rag.jinja";
  EXPECT_THAT(files_beside_weights(root_),
              ElementsAre(FileBeside(root_ / "tokenizer.json"),
                          FileBeside(root_ / "additional_chat_templates/rag.jinja", name)));
  EXPECT_EQ(place_in_folder(name), "additional_chat_templates/rag.jinja");
  for (const char* other : {"tokenizer.json", "additional_chat_templates.jinja", "additional_chat_templates..jinja"}) {
    EXPECT_EQ(place_in_folder(other), other);
  }
}

}  // namespace
}  // namespace tandem
