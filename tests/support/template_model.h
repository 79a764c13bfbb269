// A copy of the bundled model with another chat template.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/fake_cluster.h"
#include "tests/support/temp_dir.h"

namespace spl::testing {

// Fills the folder with what a router reads of a model.
inline void MakeTemplateModel(const TempDir& dir, const std::string& chat_template) {
  for (const char* file : {"tokenizer.json", "tokenizer_config.json", "config.json"})
    std::filesystem::copy(std::string(kTinyModel) + "/" + file, dir.path() + "/" + file);
  std::ofstream(dir.path() + "/chat_template.jinja") << chat_template;
}

}  // namespace spl::testing
