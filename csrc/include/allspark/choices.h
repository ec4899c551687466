// Settings that are one of a few names: enums in C++, their names in text and in Python.
#pragma once

#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

namespace [[gnu::visibility("default")]] allspark {

// Of each such enum: kNames has the names of its values, which count from 0.
template <typename E>
struct Choices;

template <typename E>
concept Choice = requires { Choices<E>::kNames; };

// Null for a number that is none of the choices.
template <Choice E>
constexpr const char* ChoiceName(E value) {
  const auto i = static_cast<size_t>(value);
  return i < std::size(Choices<E>::kNames) ? Choices<E>::kNames[i] : nullptr;
}

template <Choice E>
constexpr std::optional<E> FindChoice(std::string_view name) {
  for (size_t i = 0; i < std::size(Choices<E>::kNames); ++i) {
    if (name == Choices<E>::kNames[i]) return static_cast<E>(i);
  }
  return std::nullopt;
}

// The names for a message: "refuse" or "block", each in quotes.
template <Choice E>
std::string ChoicesText() {
  std::string text;
  const size_t count = std::size(Choices<E>::kNames);
  for (size_t i = 0; i < count; ++i) {
    text += i == 0 ? "" : i + 1 == count ? " or " : ", ";
    text += '"' + std::string(Choices<E>::kNames[i]) + '"';
  }
  return text;
}

// The compute type that a model must have been serialised for; kAny: either.
enum class MatmulPrecision { kAny, kFloat32, kBFloat16 };
template <>
struct Choices<MatmulPrecision> {
  static constexpr const char* kNames[] = {"", "float32", "bfloat16"};
};

// What StartRequest does when as many requests wait as may: refuse, or wait until there is room.
enum class QueueFullPolicy { kRefuse, kBlock };
template <>
struct Choices<QueueFullPolicy> {
  static constexpr const char* kNames[] = {"refuse", "block"};
};

// What a step computes where prompts wait and others decode (docs/configuration.md).
enum class PrefillPolicy { kBalanced, kThroughput, kFirstToken, kSmooth };
template <>
struct Choices<PrefillPolicy> {
  static constexpr const char* kNames[] = {"balanced", "throughput", "first_token", "smooth"};
};

// Log-probabilities of the logits after biases, penalties and masks, before temperature, or of the
// model's own logits.
enum class LogprobsMode { kProcessed, kRaw };
template <>
struct Choices<LogprobsMode> {
  static constexpr const char* kNames[] = {"processed", "raw"};
};

// Which tokens have a row in an output matrix. kAll: each of prompt and output but the last.
// kGeneration: for each output token, the row from which it was chosen.
enum class OutputRows { kNone, kAll, kGeneration };
template <>
struct Choices<OutputRows> {
  static constexpr const char* kNames[] = {"", "all", "generation"};
};

// The mean of a prompt's last hidden states, or the last of them, as an embedding.
enum class Pooling { kNone, kMean, kLast };
template <>
struct Choices<Pooling> {
  static constexpr const char* kNames[] = {"", "mean", "last"};
};

// When a beam search that has as many ended sequences as beams ends (transformers' early_stopping).
// kFalse: once the best beam, if it ended now, would score no better than the worst of them. kTrue:
// at once. kNever: once no beam can still become better.
enum class EarlyStopping { kFalse, kTrue, kNever };
template <>
struct Choices<EarlyStopping> {
  static constexpr const char* kNames[] = {"false", "true", "never"};
};

}  // namespace allspark
