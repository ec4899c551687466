// What the scripts share: the page's elements, and what is kept until the tab is closed.

export const byId = (id) => document.getElementById(id);

// A copy of what is in a template.
export const clone = (id) => byId(id).content.cloneNode(true).firstElementChild;

export const store = {
  get: (name) => JSON.parse(sessionStorage.getItem(`allspark.${name}`) ?? "null"),
  set(name, value) {
    try {
      sessionStorage.setItem(`allspark.${name}`, JSON.stringify(value));
    } catch {
      // It is more than what the browser keeps. It is still on the page.
    }
  },
};
