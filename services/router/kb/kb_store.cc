#include "services/router/kb/kb_store.h"

#include <utility>

#include "services/base/ids.h"
#include "services/base/log.h"
#include "services/chunk/remote/store_call.h"
#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

constexpr int kChangeAttempts = 20;

bool IsMissing(const absl::Status& status) { return status.code() == absl::StatusCode::kNotFound; }

std::string Label(const std::string& name) { return "knowledge base \"" + name + "\""; }

}  // namespace

absl::Status NoKnowledgeBase(const std::string& name) {
  return SetErrorCode(Errorf(absl::StatusCode::kNotFound, "there is no knowledge base \"{}\"", name),
                      "knowledge_base_not_found");
}

absl::Status NoVersion(const std::string& name, uint64_t version) {
  return SetErrorCode(
      SetParam(Errorf(absl::StatusCode::kNotFound, "version: knowledge base \"{}\" has no version {}", name, version),
               "version"),
      "version_not_found");
}

absl::StatusOr<KbStore::Loaded> KbStore::Load(const chunk::Digest& owner, const std::string& name) const {
  const auto record = records_->Get(owner, KbHeadRecord(name), Deadline());
  if (!record.ok()) return IsMissing(record.status()) ? NoKnowledgeBase(name) : record.status();
  absl::StatusOr<KbHead> head = ParseKbHead(record->value);
  if (!head.ok()) return Annotate(head.status(), Label(name));
  return Loaded{*std::move(head), record->revision};
}

absl::StatusOr<std::vector<KbHead>> KbStore::List(const chunk::Digest& owner) const {
  SPLICE_ASSIGN_OR_RETURN(const auto records, records_->List(owner, kKbHeadPrefix, Deadline()));
  std::vector<KbHead> heads;
  for (const chunk::StoredRecord& record : records) {
    absl::StatusOr<Loaded> loaded = Load(owner, record.name.substr(sizeof(kKbHeadPrefix) - 1));
    if (loaded.ok()) {
      heads.push_back(std::move(loaded->head));
    } else if (chunk::IsLoss(loaded.status())) {
      return loaded.status();
    } else if (!IsMissing(loaded.status())) {  // else deleted meanwhile
      log::Error("router.kb_damaged", log::F("cause", loaded.status()));
    }
  }
  return heads;
}

absl::StatusOr<size_t> KbStore::Count(const chunk::Digest& owner) const {
  SPLICE_ASSIGN_OR_RETURN(const auto records, records_->List(owner, kKbHeadPrefix, Deadline()));
  return records.size();
}

absl::Status KbStore::Write(const chunk::Digest& owner, KbHead& head, uint64_t revision) const {
  head.change = RandomId::Make().ToHex();
  const chunk::RecordClient::PutOptions options{.expected_revision = revision, .durable = head.durable};
  const absl::Status put = records_->Put(owner, KbHeadRecord(head.name), ToJson(head), options, Deadline()).status();
  if (!chunk::IsLoss(put)) return put;
  // The answer was lost, the change perhaps not.
  const absl::StatusOr<Loaded> now = Load(owner, head.name);
  return now.ok() && now->head.change == head.change ? absl::OkStatus() : put;
}

absl::StatusOr<KbHead> KbStore::Change(const chunk::Digest& owner, const std::string& name, bool create,
                                       const ChangeFn& change) const {
  absl::Status last;
  for (int attempt = 0; attempt < kChangeAttempts; ++attempt) {
    absl::StatusOr<Loaded> loaded = Load(owner, name);
    if (!loaded.ok() && !(create && IsMissing(loaded.status()))) return loaded.status();
    Loaded now = loaded.ok() ? *std::move(loaded) : Loaded{.head = {.name = name}, .revision = 0};
    SPLICE_RETURN_IF_ERROR(change(now.head));
    last = Write(owner, now.head, now.revision);
    if (last.ok()) return std::move(now.head);
    if (last.code() != absl::StatusCode::kAborted) return Annotate(last, Label(name));
  }
  return Errorf(absl::StatusCode::kAborted, "{} changes too fast; try again", Label(name));
}

absl::Status KbStore::DeleteHead(const chunk::Digest& owner, const std::string& name, uint64_t revision) const {
  return records_->Delete(owner, KbHeadRecord(name), revision, Deadline());
}

absl::StatusOr<std::shared_ptr<const KbContent>> KbStore::LoadContent(const chunk::Digest& owner,
                                                                      const std::string& name,
                                                                      const KbVersion& version) const {
  const std::string label = fmt::format("{}, version {}", Label(name), version.version);
  const auto record = records_->Get(owner, KbContentRecord(name, version.version), Deadline());
  if (!record.ok()) return IsMissing(record.status()) ? NoVersion(name, version.version) : record.status();
  absl::StatusOr<KbContent> content = ParseKbContent(record->value);
  if (!content.ok()) return Annotate(content.status(), label);
  if (content->uid != version.uid) return Errorf(absl::StatusCode::kDataLoss, "{}: its manifest is another's", label);
  return std::make_shared<const KbContent>(*std::move(content));
}

absl::Status KbStore::SaveContent(const chunk::Digest& owner, const std::string& name, uint64_t version, bool durable,
                                  const KbContent& content) const {
  return records_
      ->Put(owner, KbContentRecord(name, version), ToJson(content), {.expected_revision = {}, .durable = durable},
            Deadline())
      .status();
}

absl::Status KbStore::CreateNamespace(const chunk::Digest& id, const chunk::NamespaceSettings& settings) const {
  const absl::Status created = namespaces_->Create(id, settings, Deadline()).status();
  return created.code() == absl::StatusCode::kAlreadyExists ? absl::OkStatus() : created;
}

absl::StatusOr<chunk::NamespaceClient::Deleted> KbStore::DropVersion(const chunk::Digest& owner,
                                                                     const std::string& name, uint64_t version,
                                                                     const chunk::Digest& namespace_id) const {
  auto deleted = namespaces_->Delete(namespace_id, Deadline());
  if (!deleted.ok() && !IsMissing(deleted.status())) return deleted.status();
  const absl::Status content = records_->Delete(owner, KbContentRecord(name, version), std::nullopt, Deadline());
  if (!content.ok() && !IsMissing(content)) return content;
  return deleted.ok() ? *deleted : chunk::NamespaceClient::Deleted();
}

}  // namespace spl::router
