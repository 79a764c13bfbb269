#include "services/router/http/admin_json.h"

#include <limits>
#include <utility>

#include "services/router/request/api_error.h"
#include "services/router/request/json_reader.h"

namespace spl::router {
namespace {

constexpr uint64_t kMaxNumber = uint64_t{1} << 53;

// A namespace's settings, as both create and update take them.
void ReadSettings(ObjectReader& reader, CallerNamespaceChange* out) {
  reader.Uint("quota_bytes", kMaxNumber, &out->quota_bytes);
  reader.Uint("quota_chunks", kMaxNumber, &out->quota_chunks);
  reader.Uint("ttl_seconds", kMaxNumber, &out->ttl_seconds);
  bool is_public = false;
  if (reader.Has("public")) {
    reader.Bool("public", &is_public);
    out->is_public = is_public;
  }
}

}  // namespace

absl::StatusOr<PublishBody> ParsePublishBody(std::string_view body) {
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseJson(body));
  PublishBody out;
  ObjectReader reader(json, "");
  reader.String("name", &out.input.name);
  reader.String("instruction", &out.input.instruction);
  reader.Bool("swap", &out.input.swap);
  reader.Bool("durable", &out.input.durable);
  reader.Bool("together", &out.input.together);
  reader.Bool("stream", &out.stream);
  const Json* documents = reader.Raw("documents");
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  if (documents == nullptr) return ParamError("documents", "is required");
  if (!documents->is_array()) return ParamError("documents", "must be a list, got {}", DescribeJson(*documents));
  if (documents->size() > kMaxKbDocuments) {
    return ParamError("documents", "a version may have {} at most, got {}", kMaxKbDocuments, documents->size());
  }
  for (size_t i = 0; i < documents->size(); ++i) {
    ObjectReader item((*documents)[i], fmt::format("documents[{}].", i));
    PublishInput::Document document;
    item.String("id", &document.id);
    item.String("text", &document.text);
    SPLICE_RETURN_IF_ERROR(item.Finish());
    out.input.documents.push_back(std::move(document));
  }
  SPLICE_RETURN_IF_ERROR(CheckPublishInput(out.input));
  return out;
}

absl::StatusOr<uint64_t> ParseSwapBody(std::string_view body) {
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseJson(body));
  ObjectReader reader(json, "");
  std::optional<uint64_t> version;
  reader.Uint("version", kMaxNumber, &version);
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  if (version.value_or(0) == 0) return ParamError("version", "is required, and counts from 1");
  return *version;
}

absl::StatusOr<CallerNamespace> ParseCreateNamespaceBody(std::string_view body) {
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseJson(body));
  ObjectReader reader(json, "");
  CallerNamespace out;
  CallerNamespaceChange settings;
  reader.String("name", &out.name);
  ReadSettings(reader, &settings);
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  out.quota_bytes = settings.quota_bytes.value_or(0);
  out.quota_chunks = settings.quota_chunks.value_or(0);
  out.ttl_seconds = settings.ttl_seconds.value_or(0);
  out.is_public = settings.is_public.value_or(false);
  return out;
}

absl::StatusOr<CallerNamespaceChange> ParseUpdateNamespaceBody(std::string_view body) {
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseJson(body));
  ObjectReader reader(json, "");
  CallerNamespaceChange out;
  ReadSettings(reader, &out);
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  return out;
}

absl::StatusOr<uint64_t> ParseVersionNumber(const std::string& text, const std::string& field) {
  const bool digits = !text.empty() && text.size() <= 15 && text.find_first_not_of("0123456789") == std::string::npos;
  if (!digits || std::stoull(text) == 0) {
    return ParamError(field, "must be the number of a version, from 1 on, got \"{}\"", text.substr(0, 32));
  }
  return std::stoull(text);
}

OrderedJson VersionJson(const KbVersion& v, bool current) {
  OrderedJson out;
  out["object"] = "knowledge_base.version";
  out["version"] = v.version;
  out["state"] = KbStateName(v.state);
  out["current"] = current;
  out["created"] = v.created_ms / 1000;
  out["documents"] = v.documents;
  out["tokens"] = v.tokens;
  out["contexts"] = v.contexts;
  out["chunks"] = v.chunks;
  out["bytes"] = v.bytes;
  out["prefill_seconds"] = v.prefill_seconds;
  out["model_fingerprint"] = v.model_fingerprint;
  // Not "error": clients of event streams take an event with that for the end of the stream.
  out["failure"] = v.error.empty() ? OrderedJson(nullptr) : OrderedJson(v.error);
  return out;
}

OrderedJson HeadJson(const KbHead& head) {
  OrderedJson out;
  out["object"] = "knowledge_base";
  out["name"] = head.name;
  out["current"] = head.current == 0 ? OrderedJson(nullptr) : OrderedJson(head.current);
  out["durable"] = head.durable;
  out["versions"] = OrderedJson::array();
  for (const KbVersion& v : head.versions) out["versions"].push_back(VersionJson(v, v.version == head.current));
  return out;
}

OrderedJson ViewJson(const KbView& view) {
  OrderedJson out = HeadJson(view.head);
  out["shown_version"] = view.shown_version == 0 ? OrderedJson(nullptr) : OrderedJson(view.shown_version);
  out["instruction"] = view.content == nullptr ? OrderedJson(nullptr) : OrderedJson(view.content->instruction);
  out["documents"] = OrderedJson::array();
  if (view.content == nullptr) return out;
  for (const KbDocument& d : view.content->documents) {
    out["documents"].push_back({{"id", d.id},
                                {"sha256", d.sha256},
                                {"text_bytes", d.text.size()},
                                {"tokens", d.tokens},
                                {"context", d.context}});
  }
  return out;
}

OrderedJson DiffJson(const KnowledgeBases::DiffResult& result, const std::string& name) {
  OrderedJson out;
  out["object"] = "knowledge_base.diff";
  out["name"] = name;
  out["from"] = result.from;
  out["to"] = result.to;
  out["added"] = result.diff.added;
  out["removed"] = result.diff.removed;
  out["changed"] = result.diff.changed;
  out["unchanged"] = result.diff.unchanged;
  out["instruction_changed"] = result.diff.instruction_changed;
  return out;
}

OrderedJson ProgressJson(const PublishProgress& p) {
  OrderedJson out;
  out["object"] = "knowledge_base.progress";
  out["contexts_done"] = p.contexts_done;
  out["contexts"] = p.contexts;
  out["tokens_done"] = p.tokens_done;
  out["tokens"] = p.tokens;
  return out;
}

OrderedJson NamespaceJson(const CallerNamespace& ns) {
  OrderedJson out;
  out["object"] = "namespace";
  out["name"] = ns.name;
  out["quota_bytes"] = ns.quota_bytes;
  out["quota_chunks"] = ns.quota_chunks;
  out["ttl_seconds"] = ns.ttl_seconds;
  out["public"] = ns.is_public;
  out["implicit"] = ns.implicit;
  out["created"] = ns.created_ms / 1000;
  out["chunks"] = ns.chunks;
  out["bytes"] = ns.bytes;
  return out;
}

}  // namespace spl::router
