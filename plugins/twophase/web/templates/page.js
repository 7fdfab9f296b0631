// Follow Airflow's own choice of light or dark, which it keeps under this name; without one the browser's is used.
const root = document.documentElement;
const follow = () => {
  let theme = null;
  try { theme = localStorage.getItem("theme"); } catch { /* not allowed here: the browser's choice it is */ }
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  else delete root.dataset.theme;
};
follow();
addEventListener("storage", follow);

// Airflow shows these pages in a frame that may not leave it: its own pages are opened by the window around.
addEventListener("click", (event) => {
  const link = event.target.closest("a[data-airflow]");
  if (!link || window.parent === window || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const outside = window.parent.document.createElement("a");
  outside.href = link.href;
  window.parent.document.body.append(outside);
  outside.click();
  outside.remove();
});
