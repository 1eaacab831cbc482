// Sample completions: for every item the prompt, the reference, and what teachers and students wrote, at a chosen step.

function makeSamples(section, items, runs) {
  if (items.length === 0) return;
  const steps = [...new Set(items.flatMap((item) => item.answers.filter(isStudent).map((answer) => answer.step)))].sort((a, b) => a - b);
  const slider = section.querySelector("input"), output = section.querySelector("output"), suite = section.querySelector("select");
  const suites = [...new Set(items.map((item) => item.suite))];
  suite.append(...suites.map((name) => new Option(name, name)));
  suite.parentElement.hidden = suites.length < 2;
  slider.max = Math.max(0, steps.length - 1);
  slider.value = slider.max;
  slider.parentElement.hidden = steps.length < 2;
  section.hidden = false;

  const show = () => {
    const step = steps[slider.value];
    output.textContent = step == null ? "" : step.toLocaleString("en");
    const shown = items.filter((item) => item.suite === suite.value);
    section.querySelector(".samples").replaceChildren(...shown.map((item) => card(item, step, steps[0], runs)));
  };
  slider.oninput = suite.onchange = show;
  show();
}

const isStudent = (answer) => answer.who === "student";

// An item as a card. Of the student it has the first answer and the last one up to the chosen step.
function card(item, step, first, runs) {
  const article = element("article", "sample"), list = element("dl");
  const prompt = element("div", "text");
  for (const { role, content } of item.prompt) {
    if (role) prompt.append(element("b", "role", role));
    prompt.append(element("p", "", content));
  }
  const row = (label, content, verdict, right) => {
    const title = element("dt", "", label);
    if (verdict) title.append(element("span", right ? "verdict up" : "verdict", verdict));
    const text = element("dd");
    text.append(content);
    list.append(title, text);
  };
  row("prompt", prompt);
  row("reference", element("div", "text", item.reference.trim()));
  runs.forEach((name, run) => {
    const of = (who) => item.answers.filter((answer) => answer.run === run && who(answer));
    const suffix = runs.length > 1 ? `, ${name}` : "";
    for (const answer of of((answer) => !isStudent(answer))) row(answer.who + suffix, element("div", "text", answer.text.trim()), answer.verdict, answer.right);
    const students = of(isStudent).sort((a, b) => a.step - b.step), now = students.filter((answer) => answer.step <= step).pop();
    for (const answer of new Set([students.find((answer) => answer.step === first), now]))
      if (answer) row(`student, step ${answer.step.toLocaleString("en")}${suffix}`, element("div", "text", answer.text.trim()), answer.verdict, answer.right);
  });
  article.append(element("h3", "", item.id), list);
  return article;
}

function element(tag, className = "", text = "") {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}
