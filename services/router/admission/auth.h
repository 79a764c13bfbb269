// Who calls, and which cached KV that caller may see.
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

// The API keys that are accepted, and what each may do. Any thread; copies share one table.
class ApiKeys {
 public:
  // No keys: everyone is the anonymous caller.
  ApiKeys() = default;
  // One "key [name] [limits]" per line; "#" starts a comment line. Limits stand at the end, separated by spaces:
  //   rpm=N         requests per minute         tpm=N     tokens per minute, prompt and output
  //   concurrent=N  requests at once            weight=W  share in the queue, 1 by default
  // and role=operator, which may see and end requests of all callers and drain workers (http/control_api.h), or
  // role=admin, which may manage its own knowledge bases and namespaces from anywhere (CheckAdmin).
  // InvalidArgument names file and line.
  static absl::StatusOr<ApiKeys> Load(const std::string& path);

  // The caller of an Authorization header ("Bearer KEY", the scheme in any case). Unauthenticated when keys are
  // configured and the header is missing or holds none of them.
  absl::StatusOr<Caller> Authenticate(std::string_view authorization) const;
  bool enabled() const { return table_ != nullptr; }

  // Reads the file again if it has changed since: true when the new keys apply from now on. With an error the old ones
  // stay, until the file changes once more.
  absl::StatusOr<bool> ReloadIfChanged();

 private:
  struct Holder {
    std::string name;
    double weight = 1;
    CallerLimits limits;
    bool is_operator = false;
    bool is_admin = false;
  };
  using Holders = std::map<std::string, Holder>;  // by SHA-256 of the key (hex): the keys themselves are not kept
  struct Table {
    std::mutex mutex;  // guards the two below
    std::shared_ptr<const Holders> holders;
    std::string stamp;  // of the file that was read
    std::string path;   // set once
  };

  static absl::StatusOr<std::shared_ptr<const Holders>> Read(const std::string& path);
  static std::string StampOf(const std::string& path);

  std::shared_ptr<Table> table_;  // null: no keys
};

// Who may operate: with keys an operator; without, whoever reaches an address that listens on loopback alone.
// PermissionDenied says what is missing.
absl::Status CheckOperator(const ApiKeys& keys, const Caller& caller, bool loopback);
// Who may manage knowledge bases and namespaces, always the caller's own: on loopback everybody, elsewhere keys with
// role=operator or role=admin. PermissionDenied says what is missing.
absl::Status CheckAdmin(const ApiKeys& keys, const Caller& caller, bool loopback);

// Derives the salt of every chunk key: HMAC-SHA256 over caller and namespace name. It is the trust boundary between
// tenants: without the same key nothing can be hit. Stable over restarts, so that a warm store stays useful.
//
//   with a secret (file)     HMAC(secret, caller name ‖ namespace)
//   API keys, no secret      HMAC(API key, namespace): only the holder of the key can derive it
//   neither                  HMAC(public domain string, namespace): one open cluster, names only separate
//
// Names that begin with "public/" are shared: with a secret, HMAC(secret, namespace) for every caller.
//
// Fields are length-prefixed, so that no two pairs read alike. Immutable; any thread.
class NamespaceKeys {
 public:
  NamespaceKeys() = default;
  // The whole file is the secret, trailing line ends aside. InvalidArgument: shorter than 16 bytes.
  static absl::StatusOr<NamespaceKeys> Load(const std::string& secret_path);

  chunk::Digest Derive(const Caller& caller, std::string_view namespace_name) const;
  static bool IsPublic(std::string_view namespace_name) { return namespace_name.substr(0, 7) == "public/"; }
  // Whether callers meet in public namespaces: not with API keys and no secret, where all a router has is the key.
  bool can_share(const Caller& caller) const { return !secret_.empty() || caller.secret.empty(); }
  // Of one version of a knowledge base: no namespace name derives it.
  chunk::Digest DeriveKnowledgeBase(const Caller& caller, std::string_view name, uint64_t version) const;
  // Names the caller itself at the chunk stores: whose records and namespaces are whose. Salts no chunk.
  chunk::Digest DeriveOwner(const Caller& caller) const;

 private:
  // `kind` separates what is derived for different purposes.
  chunk::Digest DeriveFields(const Caller& caller, std::string_view kind,
                             std::initializer_list<std::string_view> fields) const;

  std::string secret_;
};

}  // namespace spl::router
