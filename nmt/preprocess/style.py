"""The style sheet of report.html: light and dark, and on paper."""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1b1f24;
  --soft: #5c6670; --line: #dde1e6; --bar: #3b6fb6; --warn: #8a4b00; --warn-card: #fff4e2;
  --good: #1d6b3a; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --card: #1d2125; --text: #e6e9ec;
  --soft: #9aa4ae; --line: #343a40; --bar: #74a7ee; --warn: #ffc46b; --warn-card: #33280f;
  --good: #7fd29b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 2px; }
h2 { font-size: 17px; margin: 0 0 12px; }
h3 { font-size: 14px; margin: 14px 0 6px; color: var(--soft); font-weight: 600; }
p { margin: 6px 0; }
.soft, caption { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 18px 20px; margin-top: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin-top: 16px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px 16px; }
.tile b { display: block; font-size: 22px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr));
  gap: 8px 32px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: 5px 28px 5px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
td:first-child { white-space: nowrap; }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
tr:last-child td { border-bottom: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.advice { background: var(--warn-card); border-color: transparent; }
.advice h2 { color: var(--warn); }
.advice ul { margin: 0; padding-left: 20px; }
.good { color: var(--good); }
svg { width: 100%; height: auto; display: block; }
.bar { fill: var(--bar); }
.grid { stroke: var(--line); }
.tick { fill: var(--soft); font-size: 12px; }
@media print { body { background: none; } section { break-inside: avoid; } }
"""
