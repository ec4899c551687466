#include "base/log.h"

#include <gtest/gtest.h>
#include <regex.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "support/alloc_counter.h"
#include "support/environment.h"
#include "support/temp_dir.h"

namespace allspark {
namespace {

// POSIX: GCC 12 warns inside its own std::regex under a sanitizer.
bool Matches(const std::string& text, const char* pattern) {
  regex_t form;
  if (regcomp(&form, pattern, REG_EXTENDED | REG_NOSUB) != 0) return false;
  const bool matches = regexec(&form, text.c_str(), 0, nullptr, 0) == 0;
  regfree(&form);
  return matches;
}

class LogTest : public ::testing::Test {
 protected:
  void TearDown() override { ConfigureLog(LogConfig()); }

  std::vector<std::string> Lines() const {
    std::ifstream file(dir_ / ("allspark." + std::to_string(getpid()) + ".log"));
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }
  const testing::TempDir dir_;
};

TEST_F(LogTest, WritesOneLinePerStatementFromTheLevelOn) {
  ConfigureLog({LogLevel::kWarning, dir_.path()});
  AS_LOG(kInfo) << "hidden";
  AS_LOG(kWarning) << "shown " << 1 << ' ' << 2.5;
  AS_LOG(kError) << "worse";
  const std::vector<std::string> lines = Lines();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_TRUE(Matches(lines[0],
                      "^W [0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}[.][0-9]{3}Z [0-9]+ "
                      "log_test[.]cc:[0-9]+[]] shown 1 2[.]5$"))
      << lines[0];
  EXPECT_EQ(lines[1][0], 'E');
}

TEST_F(LogTest, LevelOffWritesNothing) {
  ConfigureLog({LogLevel::kOff, dir_.path()});
  AS_LOG(kError) << "hidden";
  EXPECT_TRUE(Lines().empty());
}

TEST_F(LogTest, ADisabledStatementEvaluatesAndAllocatesNothing) {
  ConfigureLog({LogLevel::kError, dir_.path()});
  int evaluated = 0;
  testing::AllocationCounter counter;
  {
    const testing::AllocationCounter::Scope scope(&counter);
    AS_LOG(kInfo) << ++evaluated << std::string(1000, 'x');
  }
  EXPECT_EQ(evaluated, 0);
  EXPECT_EQ(counter.count(), 0);
}

TEST_F(LogTest, LinesOfManyThreadsStayWhole) {
  ConfigureLog({LogLevel::kInfo, dir_.path()});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 200; ++i) AS_LOG(kInfo) << "thread " << t << " line " << i << " end";
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<std::string> lines = Lines();
  EXPECT_EQ(lines.size(), 800u);
  for (const std::string& line : lines) {
    EXPECT_EQ(line.find("I "), 0u) << line;
    EXPECT_TRUE(line.ends_with(" end")) << line;
  }
}

TEST_F(LogTest, AFolderThatCannotBeOpenedLeavesStderr) {
  ::testing::internal::CaptureStderr();
  ConfigureLog({LogLevel::kWarning, dir_ / "missing"});
  AS_LOG(kWarning) << "still here";
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("the log goes to stderr: cannot open"), std::string::npos) << text;
  EXPECT_NE(text.find("still here"), std::string::npos) << text;
}

TEST_F(LogTest, ReadsTheEnvironment) {
  EXPECT_EQ(LogConfig::FromEnv().level, LogLevel::kWarning);
  EXPECT_EQ(LogConfig::FromEnv().dir, "");
  const testing::ScopedVariable level("HIE_LOG_LEVEL", "0"), dir("HIE_LOG_DIR", dir_.path());
  EXPECT_EQ(LogConfig::FromEnv().level, LogLevel::kInfo);
  EXPECT_EQ(LogConfig::FromEnv().dir, dir_.path());
  level.Set("-1");
  EXPECT_EQ(LogConfig::FromEnv().level, LogLevel::kDebug);
  level.Set("3");
  EXPECT_EQ(LogConfig::FromEnv().level, LogLevel::kOff);
  for (const char* malformed : {"", "4", "-2", "info", "1 "}) {
    level.Set(malformed);
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(LogConfig::FromEnv().level, LogLevel::kWarning);
    const std::string text = ::testing::internal::GetCapturedStderr();
    EXPECT_NE(text.find("HIE_LOG_LEVEL is \"" + std::string(malformed) + "\"; it must be -1"),
              std::string::npos)
        << text;
  }
}

TEST_F(LogTest, FieldsAreKeysAndValues) {
  ConfigureLog({LogLevel::kDebug, dir_.path()});
  AS_LOG(kDebug) << "done" << LogField("model", "m") << LogField("tokens", 12)
                 << LogField("text", "a \"b\"\n") << LogField("none", "");
  const std::vector<std::string> lines = Lines();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0][0], 'D');
  EXPECT_TRUE(lines[0].ends_with(R"(] done model=m tokens=12 text="a \"b\"\n" none="")"))
      << lines[0];
}

TEST_F(LogTest, LinesCanBeJson) {
  const testing::ScopedVariable format("ALLSPARK_LOG_FORMAT", "json");
  EXPECT_TRUE(LogConfig::FromEnv().is_json);
  format.Set("xml");
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(LogConfig::FromEnv().is_json);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("ALLSPARK_LOG_FORMAT is \"xml\""),
            std::string::npos);
  ConfigureLog({LogLevel::kInfo, dir_.path(), /*is_json=*/true});
  AS_LOG(kWarning) << "a \"b\"\\" << LogField("model", "x\ty") << LogField("tokens", -3);
  const std::vector<std::string> lines = Lines();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_TRUE(Matches(lines[0],
                      "^[{]\"time\":\"[0-9T:.-]+Z\",\"level\":\"warning\","
                      "\"thread\":[0-9]+,\"source\":\"log_test[.]cc:[0-9]+\","))
      << lines[0];
  EXPECT_TRUE(lines[0].ends_with(R"("message":"a \"b\"\\","model":"x\ty","tokens":-3})"))
      << lines[0];
}

TEST_F(LogTest, WhatIsAskedForComesAtAnyLevel) {
  ConfigureLog({LogLevel::kOff, dir_.path()});
  AS_LOG_ANYWAY(kInfo) << "asked for";
  EXPECT_EQ(Lines().size(), 1u);
}

}  // namespace
}  // namespace allspark
