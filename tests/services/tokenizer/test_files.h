// Where the tests of this folder find their data. They run in the source root.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace spl::tokenizer {

inline constexpr char kTinyModel[] = "models/splice-tiny";
inline constexpr char kTestdata[] = "tests/services/tokenizer/testdata";

inline std::string ReadTestFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
}

// One JSON value per line.
inline std::vector<nlohmann::ordered_json> ReadJsonLines(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  std::vector<nlohmann::ordered_json> lines;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty()) lines.push_back(nlohmann::ordered_json::parse(line));
  }
  return lines;
}

// The folder of goldens that the projects around this one share: beside the checkout, or where SPLICE_SHARED_DIR says.
// Empty when there is none.
inline std::string SharedDir() {
  if (std::filesystem::is_directory("../shared/golden")) return "../shared";
  const char* named = std::getenv("SPLICE_SHARED_DIR");
  return named != nullptr ? named : "";
}

}  // namespace spl::tokenizer
