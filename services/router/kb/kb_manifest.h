// What the chunk store keeps of a knowledge base beside its KV, as JSON in records (docs/knowledge-bases.md):
//
//   kb/<name>               the head: which versions there are, in what state, and which one is current
//   kbv/<name>/<version>    one version's documents and their text; written once, before its KV
//
// The head is small and changes by compare-and-swap: making a version current is one such change.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::router {

inline constexpr size_t kMaxKbNameBytes = 128;
inline constexpr size_t kMaxKbDocumentIdBytes = 256;
inline constexpr size_t kMaxKbDocuments = 10'000;
inline constexpr size_t kMaxKbVersions = 32;
inline constexpr size_t kMaxKbHistory = 32;
inline constexpr size_t kMaxKbManifestBytes = 16 << 20;  // of one version, as JSON

enum class KbState { kPublishing, kReady, kFailed };
const char* KbStateName(KbState state);

struct KbVersion {
  uint64_t version = 0;
  KbState state = KbState::kPublishing;
  std::string uid;                // drawn by its publisher: another version of the same number is another one
  uint64_t created_ms = 0;        // Unix time
  uint64_t heartbeat_ms = 0;      // of the publisher, while it is at work
  std::string model_fingerprint;  // 64 hex digits
  uint64_t documents = 0;
  uint64_t tokens = 0;  // of the documents
  uint64_t contexts = 0;
  uint64_t chunks = 0;
  uint64_t bytes = 0;  // of KV
  double prefill_seconds = 0;
  std::string error;  // of a failed one
};

struct KbHead {
  std::string name;
  bool durable = true;            // its records are kept on disk
  uint64_t current = 0;           // 0: none
  std::vector<uint64_t> history;  // versions that were current before, the latest last; each exists and is ready
  uint64_t next_version = 1;
  std::string change;               // drawn with each change: tells whether a change whose answer was lost has happened
  std::vector<KbVersion> versions;  // ascending

  const KbVersion* Find(uint64_t version) const;
  KbVersion* Find(uint64_t version);
  void Erase(uint64_t version);  // from versions and history
  // Remembers what was current; the history forgets its oldest.
  void MakeCurrent(uint64_t version);
};

struct KbDocument {
  std::string id;
  std::string text;
  std::string sha256;  // of the text, 64 hex digits
  uint64_t tokens = 0;
  uint64_t context = 0;  // which canonical context, from 0
};

struct KbContent {
  std::string uid;  // of its version
  std::string instruction;
  std::vector<KbDocument> documents;  // in the order they were given; ids are unique
};

std::string ToJson(const KbHead& head);
std::string ToJson(const KbContent& content);
// DataLoss says what is wrong: not JSON, a member missing or of another type, or one that contradicts another.
// FailedPrecondition: written by a newer program.
absl::StatusOr<KbHead> ParseKbHead(std::string_view json);
absl::StatusOr<KbContent> ParseKbContent(std::string_view json);

// 1 to 128 of A-Z a-z 0-9 . _ -, and not only dots. InvalidArgument with the param "name".
absl::Status CheckKbName(std::string_view name);

std::string KbHeadRecord(std::string_view name);
std::string KbContentRecord(std::string_view name, uint64_t version);
inline constexpr char kKbHeadPrefix[] = "kb/";

struct KbDiff {
  std::vector<std::string> added, removed, changed;  // document ids, in the order of the newer (removed: older) version
  uint64_t unchanged = 0;
  bool instruction_changed = false;
};
// By id and SHA-256 of the text.
KbDiff Diff(const KbContent& from, const KbContent& to);

std::string Sha256Hex(std::string_view text);

}  // namespace spl::router
