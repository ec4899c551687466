// The library's version, from the build.
#pragma once

namespace allspark {

extern const char kVersion[];  // "0.1.0"
extern const char kGitSha1[];  // first 8 digits, or "unknown" outside a checkout

}  // namespace allspark
