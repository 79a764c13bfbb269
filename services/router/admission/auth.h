// Identifies the caller, and determines which cached KV that caller may see.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "services/router/request/request.h"

namespace spl::router {

// The accepted API keys and their permissions. Any thread may call; copies share one table.
class ApiKeys {
 public:
  // No keys: every caller is the anonymous caller.
  ApiKeys() = default;
  // Reads one "key [name] [limits]" per line; "#" starts a comment line. Limits stand at the end, separated by spaces:
  //   rpm=N         requests per minute         tpm=N     tokens per minute, prompt and output
  //   concurrent=N  requests at once            weight=W  share in the queue, 1 by default
  // role=operator may see and end requests of all callers and drain workers (http/control_api.h); role=admin may manage
  // its own knowledge bases and namespaces from anywhere (CheckAdmin). InvalidArgument names file and line.
  static absl::StatusOr<ApiKeys> Load(const std::string& path);

  // Returns the caller of an Authorization header ("Bearer KEY", the scheme in any case). Unauthenticated: keys are
  // configured, and the header is missing or has an unknown key.
  absl::StatusOr<Caller> Authenticate(std::string_view authorization) const;
  bool enabled() const { return table_ != nullptr; }

  // Reads the file again if it has changed; true: new keys apply from now on. After an error the old ones stay until
  // the file changes again.
  absl::StatusOr<bool> ReloadIfChanged();

 private:
  struct Holder {
    std::string name;
    double weight = 1;
    CallerLimits limits;
    bool is_operator = false;
    bool is_admin = false;
  };
  using Holders = std::map<std::string, Holder>;  // by SHA-256 of the key (hex): the keys themselves are not stored
  struct Table {
    std::mutex mutex;  // guards the two below
    std::shared_ptr<const Holders> holders;
    std::string stamp;  // identifies the file contents that were read
    std::string path;   // set once
  };

  static absl::StatusOr<std::shared_ptr<const Holders>> Read(const std::string& path);
  static std::string StampOf(const std::string& path);

  std::shared_ptr<Table> table_;  // null: no keys
};

// OK for operators: with API keys, a key with role=operator; without, any caller of an address that listens on loopback
// only. PermissionDenied says what is missing.
absl::Status CheckOperator(const ApiKeys& keys, const Caller& caller, bool loopback);
// OK for callers that may manage knowledge bases and namespaces (always their own): on loopback every caller, elsewhere
// keys with role=operator or role=admin. PermissionDenied says what is missing.
absl::Status CheckAdmin(const ApiKeys& keys, const Caller& caller, bool loopback);

// Derives the salt of every chunk key: HMAC-SHA256 over caller and namespace name. This is the trust boundary between
// tenants: without the same salt, cached KV cannot be hit. Stable over restarts, so that a warm store stays useful.
//
//   with a secret (file)     HMAC(secret, caller name ‖ namespace)
//   API keys, no secret      HMAC(API key, namespace): only the holder of the key can derive it
//   neither                  HMAC(public domain string, namespace): one open cluster, names only separate
//
// Names that begin with "public/" are shared: with a secret, HMAC(secret, namespace) for every caller.
//
// Fields are length-prefixed, so that no two pairs encode alike. Immutable; any thread may call.
class NamespaceKeys {
 public:
  NamespaceKeys() = default;
  // Takes the whole file as the secret, without trailing line ends. InvalidArgument: shorter than 16 bytes.
  static absl::StatusOr<NamespaceKeys> Load(const std::string& secret_path);

  chunk::Digest Derive(const Caller& caller, std::string_view namespace_name) const;
  static bool IsPublic(std::string_view namespace_name) { return namespace_name.substr(0, 7) == "public/"; }
  // True if callers can share public namespaces. False with API keys and no secret: then a router has only the caller's
  // key.
  bool can_share(const Caller& caller) const { return !secret_.empty() || caller.secret.empty(); }
  // Salt of one version of a knowledge base; no namespace name derives it.
  chunk::Digest DeriveKnowledgeBase(const Caller& caller, std::string_view name, uint64_t version) const;
  // Identifies the caller itself at the chunk stores, as owner of records and namespaces. Salts no chunk.
  chunk::Digest DeriveOwner(const Caller& caller) const;

 private:
  // `kind` separates keys that are derived for different purposes.
  chunk::Digest DeriveFields(const Caller& caller, std::string_view kind,
                             std::initializer_list<std::string_view> fields) const;

  std::string secret_;
};

}  // namespace spl::router
