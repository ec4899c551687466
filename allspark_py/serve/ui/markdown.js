// A part of Markdown, made into nodes while the text comes. Text never becomes markup: all of it
// goes into text nodes.
//
// A complete line is rendered once, whatever comes later. Only the last line, which may go on, is
// taken back and rendered again. So the work for a piece of text does not grow with the text before
// it. The price: emphasis ends with its line.

const FENCE = /^(\s*)(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ROW = /^\s*\|(.*)$/;
const ROW_OF_LINES = /^[\s|:-]+$/;
// A line beyond this is shown as it is: looking for pairs of marks would take too long.
const LONGEST_LINE = 4096;
const MARK = /[\\`*_~[]/g;

export class Markdown {
  // root: the element that the nodes are added to.
  constructor(root) {
    this.root = root;
    this.rest = ""; // the last line, as far as it has come
    this.block = null; // what the next line may belong to; never changed, only replaced
    this.added = []; // the nodes of the last line
    this.before = null; // the block before the last line
  }

  // Adds the next piece of the text.
  put(text) {
    for (const node of this.added) node.remove();
    if (this.rest) this.block = this.before;
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    for (const line of lines) this.line(line.replace(/\r$/, ""));
    this.added = [];
    this.before = this.block;
    if (this.rest) this.line(this.rest);
  }

  append(parent, ...nodes) {
    const own = nodes.map((node) => (typeof node === "string" ? new Text(node) : node));
    this.added.push(...own);
    parent.append(...own);
  }

  line(text) {
    const { block } = this;
    if (block?.kind === "code") return this.code(text, block);
    if (!text.trim()) {
      this.block = block?.kind === "list" ? { ...block, hasGap: true } : null;
      return;
    }
    let found;
    if ((found = FENCE.exec(text))) this.fence(...found.slice(1));
    else if ((found = HEADING.exec(text))) this.heading(found[1].length, found[2]);
    else if (RULE.test(text)) this.alone(make("hr"));
    else if ((found = ITEM.exec(text))) this.item(found[1].length, found[2], found[3]);
    else if (block?.kind === "list" && (!block.hasGap || /^\s/.test(text))) this.goOn(text, block);
    else if ((found = QUOTE.exec(text))) this.textOf("blockquote", found[1]);
    else if ((found = ROW.exec(text))) this.row(found[1]);
    else this.textOf("p", text);
  }

  alone(node) {
    this.append(this.root, node);
    this.block = null;
  }

  heading(level, text) {
    // The page's own headings are of levels 1 and 2.
    this.alone(make(`h${Math.min(level + 2, 6)}`, ...inline(text)));
  }

  // A line of a paragraph or a quotation. Lines stay lines: answers mean them.
  textOf(tag, text) {
    if (this.block?.kind === tag) {
      this.append(this.block.node, "\n", ...inline(text));
      return;
    }
    const node = make(tag, ...inline(text));
    this.append(this.root, node);
    this.block = { kind: tag, node };
  }

  fence(indent, marks, language) {
    const node = make("code");
    const copy = make("button", "Copy");
    copy.type = "button";
    copy.className = "copy-code";
    const pre = make("pre", node);
    pre.tabIndex = 0; // so that a keyboard can scroll it
    const figure = make("figure", make("figcaption", language || "code", copy), pre);
    const isInItem = this.block?.kind === "list" && indent;
    const parent = isInItem ? this.block.levels.at(-1).node.lastElementChild : this.root;
    this.append(parent, figure);
    this.block = { kind: "code", node, indent, marks, outer: isInItem ? this.block : null };
  }

  code(text, block) {
    const line = text.trim();
    const isEnd = line.startsWith(block.marks) && line === line[0].repeat(line.length);
    if (isEnd) {
      this.block = block.outer;
      return;
    }
    const own = text.startsWith(block.indent) ? text.slice(block.indent.length) : text;
    this.append(block.node, `${own}\n`);
  }

  item(indent, number, text) {
    let levels = this.block?.kind === "list" ? this.block.levels : [];
    while (levels.length > 1 && indent < levels.at(-1).indent) levels = levels.slice(0, -1);
    const tag = number === undefined ? "ul" : "ol";
    const last = levels.at(-1);
    const isInner = last !== undefined && indent > last.indent + 1;
    if (isInner || last?.node.localName !== tag) {
      const outer = isInner ? levels : levels.slice(0, -1);
      const list = make(tag);
      if (number !== undefined) list.start = Number(number);
      this.append(outer.at(-1)?.node.lastElementChild ?? this.root, list);
      levels = [...outer, { indent, node: list }];
    }
    this.append(levels.at(-1).node, make("li", ...inline(text)));
    this.block = { kind: "list", levels, hasGap: false };
  }

  // A line of an item that began on an earlier line.
  goOn(text, block) {
    this.append(block.levels.at(-1).node.lastElementChild, "\n", ...inline(text.trim()));
  }

  row(text) {
    const isFirst = this.block?.kind !== "table";
    if (!isFirst && ROW_OF_LINES.test(text)) return;
    if (isFirst) {
      const node = make("table");
      this.append(this.root, make("div", node));
      node.parentNode.className = "table";
      this.block = { kind: "table", node };
    }
    const cells = text.trim().replace(/\|$/, "").split("|");
    const tag = isFirst ? "th" : "td";
    this.append(this.block.node, make("tr", ...cells.map((c) => make(tag, ...inline(c.trim())))));
  }
}

// What a mark begins, each tried where its first character stands.
const SPANS = [
  [/\\([\\`*_~[\]()#|>-])/y, (found) => found[1]],
  [/(`+)(.+?)\1(?!`)/y, (found) => make("code", found[2])],
  [/\*\*(?=\S)(.+?)\*\*(?!\*)/y, (found) => make("strong", ...inline(found[1]))],
  [/\*(?=[^\s*])([^*]+)\*/y, (found) => make("em", ...inline(found[1]))],
  [/(?<!\w)_(?=[^\s_])([^_]+)_(?!\w)/y, (found) => make("em", ...inline(found[1]))],
  [/~~(?=\S)(.+?)~~/y, (found) => make("del", ...inline(found[1]))],
  [/\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/y, (found) => link(found[1], found[2])],
];

// The nodes of a line's text, with emphasis, code and links.
function inline(text) {
  if (text.length > LONGEST_LINE) return [new Text(text)];
  const nodes = [];
  let start = 0;
  for (let at = next(text, 0); at >= 0; ) {
    const [found, node] = span(text, at);
    if (found) {
      if (at > start) nodes.push(new Text(text.slice(start, at)));
      nodes.push(typeof node === "string" ? new Text(node) : node);
      start = at + found[0].length;
    }
    at = next(text, found ? start : at + 1);
  }
  if (start < text.length) nodes.push(new Text(text.slice(start)));
  return nodes;
}

function next(text, from) {
  MARK.lastIndex = from;
  return MARK.exec(text)?.index ?? -1;
}

function span(text, at) {
  for (const [pattern, build] of SPANS) {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found) return [found, build(found)];
  }
  return [null, null];
}

function link(text, target) {
  const node = make("a", ...inline(text));
  node.href = target;
  node.rel = "noopener noreferrer";
  node.target = "_blank";
  return node;
}

function make(tag, ...children) {
  const node = document.createElement(tag);
  node.append(...children);
  return node;
}
