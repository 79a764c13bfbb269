// The records of a knowledge base in the chunk store, beside its KV, as JSON (docs/knowledge-bases.md):
//
//   kb/<name>               the head: the versions, their states, and which one is current
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
inline constexpr size_t kMaxKbManifestBytes = 16 << 20;  // limit of one version, as JSON

enum class KbState { kPublishing, kReady, kFailed };
const char* KbStateName(KbState state);

struct KbVersion {
  uint64_t version = 0;
  KbState state = KbState::kPublishing;
  std::string uid;                // drawn by its publisher: distinguishes versions with the same number
  uint64_t created_ms = 0;        // Unix time
  uint64_t heartbeat_ms = 0;      // last sign of life of a working publisher, Unix time
  std::string model_fingerprint;  // 64 hex digits
  uint64_t documents = 0;
  uint64_t tokens = 0;  // tokens of the documents
  uint64_t contexts = 0;
  uint64_t chunks = 0;
  uint64_t bytes = 0;  // bytes of KV
  double prefill_seconds = 0;
  std::string error;  // reason of a failed version
};

struct KbHead {
  std::string name;
  bool durable = true;            // its records are kept on disk
  uint64_t current = 0;           // 0: none
  std::vector<uint64_t> history;  // previously current versions, the latest last; each exists and is ready
  uint64_t next_version = 1;
  std::string change;               // drawn with each change: tells whether a change whose answer was lost has happened
  std::vector<KbVersion> versions;  // ascending

  const KbVersion* Find(uint64_t version) const;
  KbVersion* Find(uint64_t version);
  void Erase(uint64_t version);  // from versions and history
  // Makes a version current and adds the previous one to the history, which forgets its oldest.
  void MakeCurrent(uint64_t version);
};

struct KbDocument {
  std::string id;
  std::string text;
  std::string sha256;  // SHA-256 of the text, 64 hex digits
  uint64_t tokens = 0;
  uint64_t context = 0;  // number of its canonical context, from 0
};

struct KbContent {
  std::string uid;  // uid of its version
  std::string instruction;
  std::vector<KbDocument> documents;  // in the given order; ids are unique
};

std::string ToJson(const KbHead& head);
std::string ToJson(const KbContent& content);
// DataLoss says what is wrong: not JSON, a member missing or of the wrong type, or contradictory members.
// FailedPrecondition: written by a newer program.
absl::StatusOr<KbHead> ParseKbHead(std::string_view json);
absl::StatusOr<KbContent> ParseKbContent(std::string_view json);

// Accepts 1 to 128 of A-Z a-z 0-9 . _ -, but not only dots. InvalidArgument with the param "name".
absl::Status CheckKbName(std::string_view name);

std::string KbHeadRecord(std::string_view name);
std::string KbContentRecord(std::string_view name, uint64_t version);
inline constexpr char kKbHeadPrefix[] = "kb/";

struct KbDiff {
  std::vector<std::string> added, removed, changed;  // document ids, in the order of the newer (removed: older) version
  uint64_t unchanged = 0;
  bool instruction_changed = false;
};
// Compares documents by id and SHA-256 of the text.
KbDiff Diff(const KbContent& from, const KbContent& to);

std::string Sha256Hex(std::string_view text);

}  // namespace spl::router
