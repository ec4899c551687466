// Binds a config struct from its Fields() list: attributes, from_dict with unknown keys and wrong
// types refused, to_dict, equality and printing.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "allspark/config.h"

namespace allspark::python {

namespace py = pybind11;

template <typename T>
const char* TypeText() {
  if constexpr (std::is_same_v<T, bool>)
    return "a bool";
  else if constexpr (Choice<T>)
    return "a str";
  else if constexpr (std::is_enum_v<T>)
    return "a member of its enum";
  else if constexpr (std::is_integral_v<T>)
    return "an integer";
  else if constexpr (std::is_floating_point_v<T>)
    return "a number";
  else if constexpr (std::is_same_v<T, std::string>)
    return "a str";
  else if constexpr (std::is_same_v<T, std::vector<int64_t>>)
    return "a list of integers";
  else if constexpr (std::is_same_v<T, std::map<int64_t, double>>)
    return "a dict of token ids to numbers";
  else
    return "a list of lists of integers";
}

// A value as text for a message. A long text is cut; an integer of more digits than Python writes
// has a remark instead.
inline std::string Shown(py::handle value) {
  constexpr size_t kMaxCharacters = 200;
  try {
    const py::str text = py::repr(value);
    if (py::len(text) <= kMaxCharacters) return text.cast<std::string>();
    const py::slice beginning(0, kMaxCharacters, 1);
    return py::str(text[beginning]).cast<std::string>() + "...";
  } catch (const py::error_already_set&) {
    return "of too many digits to show";
  }
}

// A member as Python sees it: choices by their names.
template <typename T>
py::object ToPython(const T& value) {
  if constexpr (Choice<T>) {
    return py::str(ChoiceName(value));
  } else {
    return py::cast(value);
  }
}

template <typename T>
inline constexpr bool kIsList = false;
template <typename T>
inline constexpr bool kIsList<std::vector<T>> = true;

// A bool of Python or of NumPy, whose version 1 takes it for an index.
inline bool IsBool(py::handle value) {
  return py::isinstance<py::bool_>(value) ||
         std::string_view(Py_TYPE(value.ptr())->tp_name).starts_with("numpy.bool");
}

// Throws cast_error for what is no T. Integers are ints and what has __index__, wherever they
// stand: pybind11 takes bools for them, and cuts the fractions of NumPy's floats off.
template <typename T>
T Load(py::handle value) {
  constexpr bool is_number = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>;
  if (is_number && IsBool(value)) throw py::cast_error();
  if constexpr (is_number && std::is_integral_v<T>) {
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (index) return index.cast<T>();
    PyErr_Clear();
    throw py::cast_error();
  } else if constexpr (kIsList<T>) {
    T list;
    for (const py::object& item : value.cast<std::vector<py::object>>()) {
      list.push_back(Load<typename T::value_type>(item));
    }
    return list;
  } else if constexpr (std::is_same_v<T, std::map<int64_t, double>>) {
    if (!py::hasattr(value, "items")) throw py::cast_error();
    T map;
    for (const py::handle item : value.attr("items")()) {
      const auto [key, number] = item.cast<std::pair<py::object, py::object>>();
      map[Load<int64_t>(key)] = Load<double>(number);
    }
    return map;
  } else {
    return value.cast<T>();
  }
}

template <typename T>
T CastField(const char* name, py::handle value) {
  if constexpr (Choice<T>) {
    const auto text = CastField<std::string>(name, value);
    const std::optional<T> choice = FindChoice<T>(text);
    if (choice.has_value()) return *choice;
    throw py::value_error(std::string(name) + " is \"" + text + "\"; it must be " +
                          ChoicesText<T>());
  } else {
    // Python's bool is an int; as a number it is nearly always a mistake.
    const bool is_bool = py::isinstance<py::bool_>(value);
    if constexpr (std::is_same_v<T, bool>) {
      // With conversions None would be False. Without, NumPy's bool still is one.
      py::detail::make_caster<bool> caster;
      if (caster.load(value, /*convert=*/false)) return static_cast<bool>(caster);
    } else if (!is_bool && (!std::is_same_v<T, std::string> || py::isinstance<py::str>(value))) {
      // bytes would pass for a str.
      try {
        return Load<T>(value);
      } catch (const py::cast_error&) {
      }
    }
    if (std::is_arithmetic_v<T> && !std::is_same_v<T, bool> && !is_bool &&
        PyLong_Check(value.ptr())) {
      throw py::value_error(std::string(name) + " is " + Shown(value) + "; no " +
                            (std::is_integral_v<T> ? "int64" : "float64") + " is so large");
    }
    throw py::type_error(std::string(name) + " is " + Shown(value) + " (" +
                         py::str(py::type::of(value).attr("__name__")).cast<std::string>() +
                         "); it must be " + TypeText<T>());
  }
}

template <typename Struct>
void SetField(Struct& object, const std::string& key, py::handle value) {
  bool known = false;
  std::apply(
      [&](const auto&... field) {
        ((key == field.name
              ? (known = true,
                 object.*field.member =
                     CastField<std::remove_reference_t<decltype(object.*field.member)>>(field.name,
                                                                                        value),
                 void())
              : void()),
         ...);
      },
      Struct::Fields());
  if (known) return;
  std::string names;
  std::apply([&](const auto&... field) { ((names += std::string(" ") + field.name), ...); },
             Struct::Fields());
  throw py::value_error("unknown key '" + key + "'; the keys are:" + names);
}

template <typename Struct>
Struct FromDict(const py::dict& dict) {
  Struct object;
  for (const auto& [key, value] : dict) {
    SetField(object, CastField<std::string>("a key", key), value);
  }
  return object;
}

template <typename Struct>
py::dict ToDict(const Struct& object) {
  py::dict dict;
  std::apply(
      [&](const auto&... field) { ((dict[field.name] = ToPython(object.*field.member)), ...); },
      Struct::Fields());
  return dict;
}

template <typename Struct>
std::string Repr(const char* class_name, const Struct& object) {
  std::string text = std::string(class_name) + "(";
  const char* separator = "";
  for (const auto& [key, value] : ToDict(object)) {
    text += separator + py::str(key).template cast<std::string>() + "=" +
            py::repr(value).template cast<std::string>();
    separator = ", ";
  }
  return text + ")";
}

// [(name, type in words, lowest, highest)] of the fields; the bounds are None but for numbers.
template <typename Struct>
py::list FieldList() {
  py::list list;
  const auto append = [&](const auto& field) {
    using T = std::remove_cvref_t<decltype(Struct().*field.member)>;
    const bool is_number = std::is_same_v<T, int64_t> || std::is_same_v<T, double>;
    const auto bound = [&](double value) -> py::object {
      if (!is_number) return py::none();
      return py::float_(value);
    };
    list.append(py::make_tuple(field.name, TypeText<T>(), bound(field.min), bound(field.max)));
  };
  std::apply([&](const auto&... field) { (append(field), ...); }, Struct::Fields());
  return list;
}

// Binds attributes, to_dict, the list of fields and printing.
template <typename Struct>
py::class_<Struct> BindFields(py::module_& module, const char* class_name, const char* doc) {
  py::class_<Struct> bound(module, class_name, doc);
  std::apply(
      [&](const auto&... field) {
        (bound.def_property(
             field.name,
             [member = field.member](const Struct& object) { return ToPython(object.*member); },
             [member = field.member, name = field.name](Struct& object, py::handle value) {
               using T = std::remove_reference_t<decltype(object.*member)>;
               object.*member = CastField<T>(name, value);
             }),
         ...);
      },
      Struct::Fields());
  bound.def("to_dict", &ToDict<Struct>);
  bound.def_static("fields", &FieldList<Struct>);
  bound.def("__repr__", [class_name](const Struct& o) { return Repr(class_name, o); });
  return bound;
}

// The same for what users make and change: constructors, checks, equality and copies, too.
template <typename Config>
void BindConfig(py::module_& module, const char* class_name, const char* doc) {
  BindFields<Config>(module, class_name, doc)
      .def(py::init([](const py::kwargs& kwargs) { return FromDict<Config>(kwargs); }))
      .def_static("from_dict", &FromDict<Config>, py::arg("fields"))
      .def("validate", [](const Config& config) { return Validate(config); })
      .def(
          "__eq__", [](const Config& a, const Config& b) { return a == b; }, py::is_operator())
      .def("__copy__", [](const Config& config) { return config; });
}

}  // namespace allspark::python
