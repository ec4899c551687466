// What derives from a struct's Fields(): visiting each field, the range check, the text form, and
// the proof at compile time that the list names every member. For aggregates only (no base class,
// no array member). Pure functions.
#pragma once

#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "allspark/config.h"
#include "allspark/status.h"

namespace allspark {

namespace internal {

// Converts to whatever a member is initialised from; never evaluated.
template <typename Aggregate>
struct AnyMember {
  template <typename T>
    requires(!std::is_same_v<std::remove_cvref_t<T>, Aggregate>)
  operator T() const;  // NOLINT: implicit by design.
};

template <typename T, size_t... kIndex>
consteval bool TakesInitializers(std::index_sequence<kIndex...>) {
  return requires { T{(static_cast<void>(kIndex), AnyMember<T>{})...}; };
}

// The largest N for which T{x1, ..., xN} is well formed; smaller N always are.
template <typename T, size_t kCount = 0>
consteval size_t AggregateArity() {
  static_assert(std::is_aggregate_v<T>);
  if constexpr (TakesInitializers<T>(std::make_index_sequence<kCount + 1>())) {
    return AggregateArity<T, kCount + 1>();
  } else {
    return kCount;
  }
}

template <typename A, typename B>
constexpr bool IsSameMember(const A& a, const B& b) {
  if constexpr (std::is_same_v<A, B>) {
    return a.member == b.member;
  } else {
    return false;
  }
}

}  // namespace internal

// True when T::Fields() has as many entries as T has members, and none twice.
template <typename T>
consteval bool FieldsListEveryMember() {
  constexpr auto fields = T::Fields();
  // Each field must equal exactly one entry: itself.
  const bool unique = std::apply(
      [&](const auto&... a) {
        const auto count = [&](const auto& one) {
          return (static_cast<int>(internal::IsSameMember(one, a)) + ... + 0);
        };
        return ((count(a) == 1) && ...);
      },
      fields);
  return unique && std::tuple_size_v<decltype(fields)> == internal::AggregateArity<T>();
}

// Calls visit(field) for each entry of T::Fields(), in order.
template <typename T, typename Visit>
void ForEachField(Visit&& visit) {
  std::apply([&](const auto&... field) { (visit(field), ...); }, T::Fields());
}

std::string FormatValue(bool value);
std::string FormatValue(int64_t value);
std::string FormatValue(double value);  // The shortest text that reads back as the same number.
std::string FormatValue(const std::string& value);  // Quoted.
std::string FormatValue(CacheMode value);           // DashInfer's name.
template <Choice E>
std::string FormatValue(E value) {  // Quoted.
  const char* const name = ChoiceName(value);
  return name != nullptr ? FormatValue(std::string(name))
                         : FormatValue(static_cast<int64_t>(value));
}
template <typename T>
std::string FormatValue(const std::vector<T>& values) {
  std::string text = "[";
  for (const T& value : values) {
    if (text.size() > 1) text += ", ";
    text += FormatValue(value);
  }
  return text + "]";
}

template <typename Key, typename T>
std::string FormatValue(const std::map<Key, T>& values) {
  std::string text = "{";
  for (const auto& [key, value] : values) {
    if (text.size() > 1) text += ", ";
    text += FormatValue(key) + ": " + FormatValue(value);
  }
  return text + "}";
}

// "name=value, name=value", in the order of Fields().
template <typename T>
std::string FormatFields(const T& object) {
  std::string text;
  ForEachField<T>([&](const auto& field) {
    if (!text.empty()) text += ", ";
    text += field.name;
    text += '=';
    text += FormatValue(object.*field.member);
  });
  return text;
}

// OK, or an InvalidArgument such as "top_p is 1.5; it must be in [0, 1]". NaN is in no range.
Status CheckRange(const char* name, int64_t value, double min, double max);
Status CheckRange(const char* name, double value, double min, double max);
// The same for a value that must be one of its enum's.
template <Choice E>
Status CheckChoice(const char* name, E value) {
  if (ChoiceName(value) != nullptr) return Status::Ok();
  return Status::InvalidArgument(std::string(name) + " is " + FormatValue(value) + "; it must be " +
                                 ChoicesText<E>());
}

// Checks each number against its field's range and each choice; returns the first failure in the
// order of Fields().
template <typename T>
Status CheckFieldRanges(const T& object) {
  Status status;
  ForEachField<T>([&](const auto& field) {
    using Member = std::remove_cvref_t<decltype(object.*field.member)>;
    if constexpr (std::is_same_v<Member, int64_t> || std::is_same_v<Member, double>) {
      if (status.ok()) {
        status = CheckRange(field.name, object.*field.member, field.min, field.max);
      }
    } else if constexpr (Choice<Member>) {
      if (status.ok()) status = CheckChoice(field.name, object.*field.member);
    }
  });
  return status;
}

}  // namespace allspark
