// A copy of the bundled model with another chat template.
#pragma once

#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_replace.h"
#include "services/base/read_file.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/temp_dir.h"

namespace spl::testing {

// Fills the folder with what a router reads of a model. `renamed`: special tokens of the bundled model, and what they
// are called here.
inline void MakeTemplateModel(const TempDir& dir, const std::string& chat_template,
                              const std::vector<std::pair<std::string, std::string>>& renamed = {}) {
  for (const char* file : {"tokenizer.json", "tokenizer_config.json", "config.json"}) {
    std::string text = ReadFile(std::string(kTinyModel) + "/" + file).value();
    for (const auto& names : renamed) text = absl::StrReplaceAll(text, {names});
    std::ofstream(dir.path() + "/" + file) << text;
  }
  std::ofstream(dir.path() + "/chat_template.jinja") << chat_template;
}

}  // namespace spl::testing
