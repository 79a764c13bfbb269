// The part of a Kubernetes API server that membership talks to, over TLS on loopback: list and watch of EndpointSlices
// with resource versions, bookmarks, 410 and bearer tokens. Certificates are made when it starts.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>

namespace spl::testing {

class KubernetesApi {
 public:
  // `dir` gets ca.crt and token, as a pod's service account has them.
  explicit KubernetesApi(const std::string& dir);
  ~KubernetesApi();

  std::string address() const;  // HOST:PORT
  // Objects are EndpointSlices; their names and labels are in them.
  void Put(nlohmann::json slice);
  void Remove(const std::string& name);
  // Watches that ask for something older than now get 410.
  void ForgetHistory();
  // Ends all watches in the middle.
  void CutWatches();
  void SetToken(const std::string& token);

  struct Counters {
    int lists = 0, watches = 0, refused = 0, gone = 0;
    std::string last_target;
  };
  Counters counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace spl::testing
