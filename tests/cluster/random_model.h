// A cluster in one process whose model says anything: nothing but the request makes its answers what they are.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/support/paths.h"
#include "tools/cli/local_cluster.h"

namespace spl::test {

// With a place for tools: calls are written as Hermes does.
inline constexpr char kRandomModelTemplate[] =
    R"({% if tools %}Call by <tool_call>{"name": …, "arguments": …}</tool_call>:{% for t in tools %} {{ t.function | tojson }}{% endfor %}
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}
{% endfor %}assistant: )";

// A cluster of a random model whose tokenizer and template are put into `folder`.
inline cli::LocalClusterOptions RandomModelOptions(const std::string& folder) {
  cli::LocalClusterOptions options;
  options.model.random_weights = kTinyModel + "/config.json:25";
  for (const char* file : {"tokenizer.json", "tokenizer_config.json", "config.json"})
    std::filesystem::copy(kTinyModel + "/" + file, folder + "/" + file);
  std::ofstream(folder + "/chat_template.jinja") << kRandomModelTemplate;
  options.tokenizer_dir = folder;
  options.http_listen = options.grpc_listen = "127.0.0.1:0";
  options.backend = "cpu";
  options.kv_bytes = 128 << 20;
  return options;
}

// The tokenizer of `folder` with other texts for some of its special tokens.
inline void RenameSpecialTokens(const std::string& folder, const std::vector<std::string>& texts) {
  const char* const names[] = {"<|seg|>", "<|pad|>", "<|reserved_0|>", "<|reserved_1|>", "<|begin_of_text|>"};
  for (const char* file : {"/tokenizer.json", "/tokenizer_config.json"}) {
    std::ifstream in(folder + file);
    std::string all(std::istreambuf_iterator<char>(in), {});
    in.close();
    for (size_t i = 0; i < texts.size(); ++i) {
      for (size_t at = all.find(names[i]); at != std::string::npos; at = all.find(names[i], at + texts[i].size()))
        all.replace(at, std::string(names[i]).size(), texts[i]);
    }
    std::ofstream(folder + file) << all;
  }
}

}  // namespace spl::test
