// The library's version, from the build.

#include <string>

#include "allspark/engine.h"

namespace allspark {

// ALLSPARK_VERSION: "0.1.0". ALLSPARK_GIT_SHA1: 8 digits, or "unknown" outside a checkout.
std::string Engine::Version() { return ALLSPARK_VERSION "/(GitSha1:" ALLSPARK_GIT_SHA1 ")"; }

}  // namespace allspark
