#include "services/router/kb/kb_manifest.h"

#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "services/base/ids.h"
#include "services/router/request/api_error.h"
#include "services/router/request/json_reader.h"

namespace spl::router {
namespace {

constexpr uint64_t kFormatVersion = 1;
constexpr uint64_t kMaxNumber = uint64_t{1} << 53;  // every JSON reader holds it exactly
constexpr std::string_view kDigits = "0123456789abcdef";

// Members in the order of their names, as manifests have been written from the first.
using SortedJson = nlohmann::json;

std::string Dump(const SortedJson& json) { return json.dump(-1, ' ', false, SortedJson::error_handler_t::replace); }

absl::Status Damaged(const std::string& what) {
  return Errorf(absl::StatusCode::kDataLoss, "the manifest is damaged: {}", what);
}

bool IsSha256(std::string_view hex) { return hex.size() == 64 && hex.find_first_not_of(kDigits) == std::string::npos; }

// Reads the members of one object of ours; remembers the first complaint, like ObjectReader, whose reading it shares.
class ManifestReader {
 public:
  explicit ManifestReader(const Json& object) : reader_(object, "") {}

  uint64_t Number(const char* name) {
    std::optional<uint64_t> value;
    reader_.Uint(name, kMaxNumber, &value);
    Require(value.has_value(), name);
    return value.value_or(0);
  }
  double Real(const char* name) {
    std::optional<double> value;
    reader_.Number(name, &value);
    Require(value.has_value(), name);
    return value.value_or(0);
  }
  std::string Text(const char* name) {
    std::string value;
    Require(reader_.Has(name), name);
    reader_.String(name, &value);
    return value;
  }
  bool Flag(const char* name) {
    bool value = false;
    Require(reader_.Has(name), name);
    reader_.Bool(name, &value);
    return value;
  }
  const Json& List(const char* name) {
    static const Json kNone = Json::array();
    const Json* const value = reader_.Raw(name);
    Require(value != nullptr && value->is_array(), name);
    return value != nullptr && value->is_array() ? *value : kNone;
  }
  void Require(bool holds, const std::string& what) {
    if (!holds && missing_.empty()) missing_ = what;
  }
  absl::Status Finish() const {
    const absl::Status status = reader_.Finish();
    if (!status.ok()) return Damaged(MessageOf(status));
    return missing_.empty() ? absl::OkStatus() : Damaged(missing_ + " is missing or makes no sense");
  }

 private:
  ObjectReader reader_;
  std::string missing_;
};

absl::StatusOr<Json> ParseManifest(std::string_view text) {
  absl::StatusOr<Json> json = ParseJson(text);
  if (!json.ok()) return Damaged(MessageOf(json.status()));
  if (!json->is_object()) return Damaged("it is no JSON object");
  const auto format = json->find("format");
  if (format == json->end() || !format->is_number_unsigned()) return Damaged("format is missing");
  if (format->get<uint64_t>() > kFormatVersion) {
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "the manifest has format {}, this program reads {}: a newer router wrote it", format->get<uint64_t>(),
                  kFormatVersion);
  }
  return json;
}

absl::StatusOr<KbState> ParseState(const std::string& name) {
  for (const KbState state : {KbState::kPublishing, KbState::kReady, KbState::kFailed}) {
    if (name == KbStateName(state)) return state;
  }
  return Damaged("state \"" + name + "\"");
}

absl::StatusOr<KbVersion> ParseVersion(const Json& json) {
  ManifestReader reader(json);
  KbVersion v;
  v.version = reader.Number("version");
  const std::string state = reader.Text("state");
  v.uid = reader.Text("uid");
  v.created_ms = reader.Number("created_ms");
  v.heartbeat_ms = reader.Number("heartbeat_ms");
  v.model_fingerprint = reader.Text("model_fingerprint");
  v.documents = reader.Number("documents");
  v.tokens = reader.Number("tokens");
  v.contexts = reader.Number("contexts");
  v.chunks = reader.Number("chunks");
  v.bytes = reader.Number("bytes");
  v.prefill_seconds = reader.Real("prefill_seconds");
  v.error = reader.Text("error");
  reader.Require(v.version > 0, "version");
  reader.Require(IsSha256(v.model_fingerprint), "model_fingerprint");
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  SPLICE_ASSIGN_OR_RETURN(v.state, ParseState(state));
  return v;
}

SortedJson VersionJson(const KbVersion& v) {
  return {{"version", v.version},
          {"state", KbStateName(v.state)},
          {"uid", v.uid},
          {"created_ms", v.created_ms},
          {"heartbeat_ms", v.heartbeat_ms},
          {"model_fingerprint", v.model_fingerprint},
          {"documents", v.documents},
          {"tokens", v.tokens},
          {"contexts", v.contexts},
          {"chunks", v.chunks},
          {"bytes", v.bytes},
          {"prefill_seconds", v.prefill_seconds},
          {"error", v.error}};
}

}  // namespace

const char* KbStateName(KbState state) {
  switch (state) {
    case KbState::kPublishing:
      return "publishing";
    case KbState::kReady:
      return "ready";
    case KbState::kFailed:
      break;
  }
  return "failed";
}

const KbVersion* KbHead::Find(uint64_t version) const {
  const auto found =
      std::find_if(versions.begin(), versions.end(), [&](const KbVersion& v) { return v.version == version; });
  return found == versions.end() ? nullptr : &*found;
}

KbVersion* KbHead::Find(uint64_t version) { return const_cast<KbVersion*>(std::as_const(*this).Find(version)); }

void KbHead::Erase(uint64_t version) {
  std::erase_if(versions, [&](const KbVersion& v) { return v.version == version; });
  std::erase(history, version);
}

void KbHead::MakeCurrent(uint64_t version) {
  if (version == current) return;
  std::erase(history, version);
  if (current != 0) history.push_back(current);
  if (history.size() > kMaxKbHistory) history.erase(history.begin());
  current = version;
}

std::string ToJson(const KbHead& head) {
  SortedJson versions = SortedJson::array();
  for (const KbVersion& v : head.versions) versions.push_back(VersionJson(v));
  return Dump({{"format", kFormatVersion},
               {"name", head.name},
               {"durable", head.durable},
               {"current", head.current},
               {"history", head.history},
               {"next_version", head.next_version},
               {"change", head.change},
               {"versions", std::move(versions)}});
}

absl::StatusOr<KbHead> ParseKbHead(std::string_view text) {
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseManifest(text));
  ManifestReader reader(json);
  KbHead head;
  reader.Number("format");
  head.name = reader.Text("name");
  head.durable = reader.Flag("durable");
  head.current = reader.Number("current");
  head.next_version = reader.Number("next_version");
  head.change = reader.Text("change");
  const Json& history = reader.List("history");
  const Json& versions = reader.List("versions");
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  for (const Json& item : versions) {
    SPLICE_ASSIGN_OR_RETURN(KbVersion v, ParseVersion(item));
    if (!head.versions.empty() && v.version <= head.versions.back().version) return Damaged("versions do not ascend");
    head.versions.push_back(std::move(v));
  }
  for (const Json& item : history) {
    if (!item.is_number_unsigned()) return Damaged("history");
    head.history.push_back(item.get<uint64_t>());
  }
  const auto ready = [&](uint64_t version) {
    const KbVersion* const v = head.Find(version);
    return v != nullptr && v->state == KbState::kReady;
  };
  if (head.current != 0 && !ready(head.current)) return Damaged("the current version is none of the ready ones");
  if (!std::all_of(head.history.begin(), head.history.end(), ready)) return Damaged("history names no ready version");
  if (!head.versions.empty() && head.next_version <= head.versions.back().version) return Damaged("next_version");
  return head;
}

std::string ToJson(const KbContent& content) {
  SortedJson documents = SortedJson::array();
  for (const KbDocument& d : content.documents) {
    documents.push_back(
        {{"id", d.id}, {"text", d.text}, {"sha256", d.sha256}, {"tokens", d.tokens}, {"context", d.context}});
  }
  return Dump({{"format", kFormatVersion},
               {"uid", content.uid},
               {"instruction", content.instruction},
               {"documents", std::move(documents)}});
}

absl::StatusOr<KbContent> ParseKbContent(std::string_view text) {
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseManifest(text));
  ManifestReader reader(json);
  KbContent content;
  reader.Number("format");
  content.uid = reader.Text("uid");
  content.instruction = reader.Text("instruction");
  const Json& documents = reader.List("documents");
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  std::set<std::string> ids;
  for (const Json& item : documents) {
    ManifestReader fields(item);
    KbDocument d;
    d.id = fields.Text("id");
    d.text = fields.Text("text");
    d.sha256 = fields.Text("sha256");
    d.tokens = fields.Number("tokens");
    d.context = fields.Number("context");
    SPLICE_RETURN_IF_ERROR(fields.Finish());
    // A text that is not the one that was published would be served as if it were: better none.
    if (d.sha256 != Sha256Hex(d.text)) return Damaged("the text of document \"" + d.id + "\" is not the published one");
    if (!ids.insert(d.id).second) return Damaged("document \"" + d.id + "\" stands in it twice");
    content.documents.push_back(std::move(d));
  }
  return content;
}

absl::Status CheckKbName(std::string_view name) {
  constexpr std::string_view kAllowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
  if (!name.empty() && name.size() <= kMaxKbNameBytes && name.find_first_not_of(kAllowed) == std::string::npos &&
      name.find_first_not_of('.') != std::string::npos) {
    return absl::OkStatus();
  }
  return ParamError("name", "must be 1 to {} of A-Z a-z 0-9 . _ - (and not only dots), got \"{}\"", kMaxKbNameBytes,
                    name.substr(0, kMaxKbNameBytes));
}

std::string KbHeadRecord(std::string_view name) { return fmt::format("{}{}", kKbHeadPrefix, name); }
std::string KbContentRecord(std::string_view name, uint64_t version) { return fmt::format("kbv/{}/{}", name, version); }

KbDiff Diff(const KbContent& from, const KbContent& to) {
  KbDiff diff{.instruction_changed = from.instruction != to.instruction};
  std::map<std::string_view, const KbDocument*> old;
  for (const KbDocument& d : from.documents) old[d.id] = &d;
  for (const KbDocument& d : to.documents) {
    const auto found = old.find(d.id);
    if (found == old.end()) {
      diff.added.push_back(d.id);
      continue;
    }
    if (found->second->sha256 == d.sha256) {
      ++diff.unchanged;
    } else {
      diff.changed.push_back(d.id);
    }
    old.erase(found);
  }
  for (const KbDocument& d : from.documents) {
    if (old.count(d.id) != 0) diff.removed.push_back(d.id);
  }
  return diff;
}

std::string Sha256Hex(std::string_view text) {
  std::array<uint8_t, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const uint8_t*>(text.data()), text.size(), digest.data());
  return HexEncode(digest);
}

}  // namespace spl::router
