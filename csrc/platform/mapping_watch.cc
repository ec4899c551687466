#include "platform/mapping_watch.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>

namespace allspark {

// In a list that only grows, so that the handler can walk it at any moment. `end` is set last and
// cleared first; while it is 0, the slot watches nothing.
struct MappingWatch::Slot {
  std::atomic<uintptr_t> begin{0}, end{0};
  std::atomic<bool> is_taken{true};
  std::atomic<bool> is_broken{false};
  Slot* next = nullptr;
};

struct MappingSlots {
  using Slot = MappingWatch::Slot;

  static inline std::atomic<Slot*> first{nullptr};
  static inline struct sigaction previous {};
  static inline uintptr_t page_bytes = 4096;

  static Slot* Take() {
    for (Slot* slot = first.load(); slot != nullptr; slot = slot->next) {
      if (!slot->is_taken.exchange(true)) return slot;
    }
    Slot* const slot = new Slot;
    slot->next = first.load();
    while (!first.compare_exchange_weak(slot->next, slot)) {
    }
    return slot;
  }

  // The slot whose mapping holds the address, and the mapping's end.
  static Slot* Find(uintptr_t address, uintptr_t* end) {
    for (Slot* slot = first.load(); slot != nullptr; slot = slot->next) {
      *end = slot->end.load();
      const uintptr_t begin = slot->begin.load();
      // If the slot got another mapping meanwhile, neither of the two is the one that is being
      // read.
      if (*end == slot->end.load() && begin <= address && address < *end) return slot;
    }
    return nullptr;
  }

  // Maps zeros from the unreadable page to the mapping's end, so that there is only one fault.
  static bool Repair(const siginfo_t& info) {
    if (info.si_code != BUS_ADRERR && info.si_code != BUS_MCEERR_AR) return false;
    const auto address = reinterpret_cast<uintptr_t>(info.si_addr);
    uintptr_t end = 0;
    Slot* const slot = Find(address, &end);
    if (slot == nullptr) return false;
    slot->is_broken.store(true);
    const uintptr_t page = address - address % page_bytes;
    return mmap(reinterpret_cast<void*>(page), end - page, PROT_READ,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
  }

  static void PassOn(int signal, siginfo_t* info, void* context) {
    if ((previous.sa_flags & SA_SIGINFO) != 0) {
      previous.sa_sigaction(signal, info, context);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
      previous.sa_handler(signal);
    } else {
      const bool is_sent = info->si_code <= 0;  // by a process, not by a read
      if (is_sent && previous.sa_handler == SIG_IGN) return;
      ::signal(signal, SIG_DFL);
      if (is_sent) raise(signal);  // Otherwise the read is repeated, and ends the process.
    }
  }

  static void OnSignal(int signal, siginfo_t* info, void* context) {
    const int error = errno;
    if (!Repair(*info)) PassOn(signal, info, context);
    errno = error;
  }

  // Only once: a handler that is installed later stays.
  static void Install() {
    static std::once_flag once;
    std::call_once(once, [] {
      page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
      struct sigaction action {};
      action.sa_sigaction = OnSignal;
      action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
      sigemptyset(&action.sa_mask);
      sigaction(SIGBUS, &action, &previous);
    });
  }
};

MappingWatch::MappingWatch(const void* data, size_t bytes) {
  MappingSlots::Install();
  slot_ = MappingSlots::Take();
  slot_->is_broken.store(false);
  const auto begin = reinterpret_cast<uintptr_t>(data);
  slot_->begin.store(begin);
  slot_->end.store(begin + bytes);
}

MappingWatch::~MappingWatch() {
  if (slot_ == nullptr) return;
  slot_->end.store(0);
  slot_->is_taken.store(false);
}

bool MappingWatch::IsBroken() const { return slot_ != nullptr && slot_->is_broken.load(); }

}  // namespace allspark
