// Policies as users write them.
#include "scheduler/plan/policy.hpp"

#include <gtest/gtest.h>

#include "core/base/error.hpp"

namespace tandem {
namespace {

TEST(Policy, ReadsEveryFormAndPrintsItBack) {
  for (const char* text : {"auto", "device", "host", "stream", "static:0.25", "static:1", "static:0", "interleave:1",
                           "interleave:4", "interleave:3,resident=0.5"}) {
    EXPECT_EQ(parse_policy(text).text(), text);
    EXPECT_EQ(parse_policy(parse_policy(text).text()), parse_policy(text));
  }
}

TEST(Policy, RefusesWhatItDoesNotMean) {
  for (const char* text : {"", "Host", "static", "static:", "static:1.5", "static:-0.1", "static:nan", "static:0.5x",
                           "interleave", "interleave:0", "interleave:-1", "interleave:2.5", "interleave:2,",
                           "interleave:2,resident=2", "interleave:2,share=0.5", "stream:1", "device,host"}) {
    EXPECT_THROW(parse_policy(text), UsageError) << text;
  }
}

TEST(Policy, RefusalNamesTheAcceptedForms) {
  try {
    parse_policy("static:1.5");
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("static:R (0 <= R <= 1)"), std::string::npos);
    EXPECT_EQ(error.exit_code(), ExitCode::usage);
  }
}

}  // namespace
}  // namespace tandem
