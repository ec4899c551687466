#include "engine/version.h"

namespace allspark {

const char kVersion[] = ALLSPARK_VERSION;
const char kGitSha1[] = ALLSPARK_GIT_SHA1;

}  // namespace allspark
