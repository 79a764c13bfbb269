// Tokenizer::Load: reads tokenizer.json, and the tokens that the other files of a model folder name.
#include <charconv>
#include <utility>

#include "services/base/read_file.h"
#include "services/base/status.h"
#include "services/tokenizer/hf_tokenizer.h"
#include "services/tokenizer/model_files.h"

namespace spl::tokenizer {
namespace {

struct SideFile {
  nlohmann::json document;
  JsonField root;
};

absl::Status ReadSideFile(const std::string& model_dir, const std::string& name, SideFile* file) {
  SPLICE_ASSIGN_OR_RETURN(file->document, ReadOptionalJson(model_dir, name));
  file->root = {&file->document, model_dir + "/" + name + ": "};
  return absl::OkStatus();
}

// Adds tokens that only tokenizer_config.json lists. Those of tokenizer.json must agree with it.
absl::Status AddConfigTokens(const JsonField& config, HfTokenizer* tokenizer) {
  const std::optional<JsonField> entries = config.Find("added_tokens_decoder");
  if (!entries) return absl::OkStatus();
  SPLICE_RETURN_IF_ERROR(entries->CheckObject());
  for (const auto& [key, value] : entries->value->items()) {
    const JsonField field{&value, entries->path + "[\"" + key + "\"]"};
    int64_t id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || end != key.data() + key.size()) {
      return InvalidArgument("{}: the key is not a token id", field.path);
    }
    SPLICE_ASSIGN_OR_RETURN(const AddedToken token, ParseAddedToken(field, id));
    SPLICE_RETURN_IF_ERROR(tokenizer->AddToken(token, field.path));
  }
  return absl::OkStatus();
}

// The ids (one or a list) in member `key` of a configuration file; empty: it is absent.
absl::StatusOr<std::vector<TokenId>> IdsOf(const JsonField& root, std::string_view key) {
  std::vector<TokenId> ids;
  const std::optional<JsonField> member = root.Find(key);
  if (!member) return ids;
  const nlohmann::json list = member->value->is_array() ? *member->value : nlohmann::json::array({*member->value});
  for (const nlohmann::json& id : list) {
    if (!id.is_number_integer() || id < 0 || id > kTokenIdMax) {
      return member->Wrong("one or more token ids");
    }
    ids.push_back(id.get<TokenId>());
  }
  return ids;
}

// The id of a token that a file names by its text.
absl::StatusOr<std::optional<TokenId>> NamedToken(const HfTokenizer& tokenizer, const JsonField& root,
                                                  std::string_view key) {
  SPLICE_ASSIGN_OR_RETURN(const std::optional<std::string> content, TokenContent(root, key));
  if (!content) return std::optional<TokenId>();
  const std::optional<TokenId> id = tokenizer.IdOf(*content);
  if (!id) return InvalidArgument("{}{} is \"{}\", which the vocabulary does not have", root.path, key, *content);
  return id;
}

struct SideFiles {
  SideFile tokenizer_config;
  SideFile special_tokens_map;
  SideFile generation_config;
  SideFile config;
};

absl::Status SetBos(const SideFiles& files, HfTokenizer* tokenizer) {
  for (const SideFile* file : {&files.tokenizer_config, &files.special_tokens_map}) {
    SPLICE_ASSIGN_OR_RETURN(const std::optional<TokenId> id, NamedToken(*tokenizer, file->root, "bos_token"));
    if (id) return tokenizer->SetBos(*id, file->root.path);
  }
  // Ids are used only if the folder has neither file: a null bos_token (Qwen) means that there is none, although
  // config.json still has a number.
  if (!files.tokenizer_config.document.empty() || !files.special_tokens_map.document.empty()) return absl::OkStatus();
  SPLICE_ASSIGN_OR_RETURN(const std::vector<TokenId> ids, IdsOf(files.config.root, "bos_token_id"));
  return ids.empty() ? absl::OkStatus() : tokenizer->SetBos(ids[0], files.config.root.path);
}

absl::Status SetEos(const SideFiles& files, HfTokenizer* tokenizer) {
  for (const SideFile* file : {&files.generation_config, &files.config}) {
    SPLICE_ASSIGN_OR_RETURN(const std::vector<TokenId> ids, IdsOf(file->root, "eos_token_id"));
    for (const TokenId id : ids) SPLICE_RETURN_IF_ERROR(tokenizer->AddEos(id, file->root.path + "eos_token_id"));
    if (!ids.empty()) return absl::OkStatus();
  }
  for (const SideFile* file : {&files.tokenizer_config, &files.special_tokens_map}) {
    SPLICE_ASSIGN_OR_RETURN(const std::optional<TokenId> id, NamedToken(*tokenizer, file->root, "eos_token"));
    if (id) return tokenizer->AddEos(*id, file->root.path);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& model_dir) {
  const std::string path = model_dir + "/tokenizer.json";
  SPLICE_ASSIGN_OR_RETURN(const std::string json, ReadFile(path));
  SPLICE_ASSIGN_OR_RETURN(std::unique_ptr<HfTokenizer> tokenizer, HfTokenizer::Parse(json, path));
  SideFiles files;
  SPLICE_RETURN_IF_ERROR(ReadSideFile(model_dir, "tokenizer_config.json", &files.tokenizer_config));
  SPLICE_RETURN_IF_ERROR(ReadSideFile(model_dir, "special_tokens_map.json", &files.special_tokens_map));
  SPLICE_RETURN_IF_ERROR(ReadSideFile(model_dir, "generation_config.json", &files.generation_config));
  SPLICE_RETURN_IF_ERROR(ReadSideFile(model_dir, "config.json", &files.config));
  SPLICE_RETURN_IF_ERROR(AddConfigTokens(files.tokenizer_config.root, tokenizer.get()));
  SPLICE_RETURN_IF_ERROR(SetBos(files, tokenizer.get()));
  SPLICE_RETURN_IF_ERROR(SetEos(files, tokenizer.get()));
  return tokenizer;
}

}  // namespace spl::tokenizer
