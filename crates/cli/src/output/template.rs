//! Templates of `--format`: Go's language, with the functions, escapes and tables of podman.
//!
//! The crate `gotmpl` parses and executes templates. Podman's additions are in this file: `table `, `\t` and `\n`
//! outside of actions, a newline after each row, and functions such as `json` and `join`. Sources: podman,
//! `pkg/report/template.go` and `formatter.go` of containers/common.
//!
//! A template comes from the user who runs the command. Its depth, rounds and output are limited, but not the memory of
//! a variable that it doubles again and again. Its values may come from images and containers, so the output goes to a
//! terminal only through [`print()`].

mod disguise;
mod values;

use std::fmt;
use std::io::{IsTerminal as _, Write as _};

use anyhow::{Context as _, anyhow, bail};
use gotmpl::{MissingKey, Template, TemplateError, Value};
use serde_json::Value as Json;

use crate::output::report;
use crate::output::template::disguise::{disguise, escape_disguised};
use crate::output::template::values::{FUNCTIONS, MOST_DEPTH, from_json, with_functions};

/// Maximum length of a template, in bytes.
const MOST_TEMPLATE: usize = 64 << 10;

/// Maximum length of the output of a template, in bytes.
const MOST_OUTPUT: usize = 64 << 20;

/// Maximum number of rounds of all `range` actions in a template.
const MOST_ROUNDS: u64 = 1_000_000;

/// Width of a table's column, and the space between two columns, in characters. Source: podman, `formatter.go`.
const LEAST_COLUMN: usize = 12;
const GAP: usize = 2;

/// Names of fields whose entries have names that users choose. A missing entry is `<no value>` instead of an error.
const OPEN_FIELDS: [&str; 8] = [
    "Annotations",
    "ExposedPorts",
    "Labels",
    "Networks",
    "Options",
    "PortBindings",
    "Ports",
    "Volumes",
];

/// Renders a value by a template. The result has no final newline, unless the template writes one.
pub(crate) fn render(template: &str, value: &Json) -> anyhow::Result<String> {
    if template.starts_with(TABLE) {
        let mut text = list(template, std::slice::from_ref(value), &[])?;
        text.truncate(text.trim_end_matches('\n').len());
        return Ok(text);
    }
    let text = prepared(template, Columns::AsWritten)?;
    let mut out = String::new();
    execute(&text, value, &mut out).with_context(|| about(template))?;
    Ok(out)
}

/// Returns whether `--format` asks for JSON of the whole list, as podman's `report.IsJSON` decides.
pub(crate) fn is_json(template: &str) -> bool {
    let words = template.trim();
    let inner = words.strip_prefix("{{").and_then(|it| it.strip_suffix("}}"));
    words == "json" || inner.is_some_and(|it| ["json", "json ."].contains(&it.trim()))
}

/// Renders a list by a template, with a line for each row. `table ` at the beginning of the template adds titles and
/// aligns columns. A template that has `{{range .}}` gets the whole list. `titles` has the titles of fields whose title
/// is not their name.
pub(crate) fn list(
    template: &str,
    rows: &[Json],
    titles: &[(&str, &str)],
) -> anyhow::Result<String> {
    let (body, columns) = match template.strip_prefix(TABLE) {
        Some(body) => (body, Columns::AtSpaces),
        None => (template, Columns::AsWritten),
    };
    let text = prepared(body, columns)?;
    let context = || about(template);
    let mut out = String::new();
    if columns == Columns::AsWritten && ranges_over_all(&text) {
        let all = Json::Array(rows.iter().map(disguise).collect());
        execute(&text, &all, &mut out).with_context(context)?;
        end_line(&mut out, &text);
        return Ok(escape_disguised(&out));
    }
    if columns == Columns::AtSpaces {
        out.push_str(&title_line(&text, titles));
        end_line(&mut out, &text);
    }
    for row in rows {
        execute(&text, &disguise(row), &mut out).with_context(context)?;
        end_line(&mut out, &text);
    }
    let out = escape_disguised(&out);
    if columns == Columns::AsWritten {
        return Ok(out);
    }
    aligned(&out).ok_or_else(too_long).with_context(context)
}

/// Prints a list by a template, as [`list`] renders it. Without `has_no_titles`, a table has titles.
pub(crate) fn print_list(
    template: &str,
    rows: &[Json],
    titles: &[(&str, &str)],
    has_no_titles: bool,
) -> anyhow::Result<()> {
    let text = list(template, rows, titles)?;
    let is_cut = has_no_titles && template.starts_with(TABLE);
    print(if is_cut { text.split_once('\n').map_or("", |it| it.1) } else { text.as_str() })
}

/// Prints a rendered text as it is, for programs; [`list`] has escaped control characters of values, which could look
/// like the template's. On a terminal, control characters of the values are escaped.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = report::standard_output();
    if !std::io::stdout().is_terminal() {
        out.write_all(text.as_bytes())?;
    } else {
        // Tabs and newlines are the template's.
        for piece in text.split_inclusive(['\n', '\t']) {
            let end = piece.trim_end_matches(['\n', '\t']).len();
            out.write_all(report::plain(&piece[..end]).as_bytes())?;
            out.write_all(&piece.as_bytes()[end..])?;
        }
    }
    out.flush()?;
    Ok(())
}

/// The word that makes a template a table.
const TABLE: &str = "table ";

/// Whether spaces outside of actions separate columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Columns {
    AsWritten,
    AtSpaces,
}

fn about(template: &str) -> String {
    const MOST: usize = 200;
    let rest = if template.chars().nth(MOST).is_some() { "..." } else { "" };
    format!("cannot use the template \"{}{rest}\"", template.chars().take(MOST).collect::<String>())
}

/// Adds the newline that podman adds to templates without a final one.
fn end_line(out: &mut String, text: &str) {
    if !text.ends_with('\n') {
        out.push('\n');
    }
}

/// A part of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TemplatePiece<'a> {
    Text(&'a str),
    /// With its braces.
    Action(&'a str),
}

fn pieces(template: &str) -> Vec<TemplatePiece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = template;
    while let Some(start) = rest.find("{{") {
        let (text, action) = rest.split_at(start);
        let (action, after) = action.split_at(action_length(action));
        pieces.extend([TemplatePiece::Text(text), TemplatePiece::Action(action)]);
        rest = after;
    }
    pieces.push(TemplatePiece::Text(rest));
    pieces
}

/// Returns the length of the action at the beginning of `text`. Strings and comments in it may contain `}}`. The whole
/// text is the action if it has no end, which the parser refuses.
fn action_length(text: &str) -> usize {
    if content(text).starts_with("/*") {
        let end = text.find("*/").and_then(|at| Some(at + text[at..].find("}}")?));
        return end.map_or(text.len(), |at| at + 2);
    }
    let mut quote = None;
    let mut is_escaped = false;
    for (at, it) in text.char_indices().skip(2) {
        match quote {
            Some(_) if is_escaped => is_escaped = false,
            Some(open) => {
                is_escaped = it == '\\' && open != '`';
                if it == open {
                    quote = None;
                }
            }
            None if matches!(it, '"' | '\'' | '`') => quote = Some(it),
            None if text[at..].starts_with("}}") => return at + 2,
            None => {}
        }
    }
    text.len()
}

/// Returns an action without its braces, the dashes that trim spaces, and spaces.
fn content(action: &str) -> &str {
    let inner = action.strip_prefix("{{").unwrap_or(action);
    let inner = inner.strip_suffix("}}").unwrap_or(inner);
    let inner = inner.strip_prefix("- ").unwrap_or(inner);
    inner.strip_suffix(" -").unwrap_or(inner).trim()
}

/// Replaces `\t` and `\n` outside of actions, and podman's `.Label "NAME"` inside of them.
fn prepared(template: &str, columns: Columns) -> anyhow::Result<String> {
    if template.len() > MOST_TEMPLATE {
        bail!("a template is longer than {}", report::size(MOST_TEMPLATE as u64));
    }
    let mut text = String::new();
    for piece in pieces(template) {
        match piece {
            TemplatePiece::Text(it) => {
                let it = it.replace("\\t", "\t").replace("\\n", "\n");
                text.push_str(&match columns {
                    Columns::AtSpaces => it.replace(' ', "\t"),
                    Columns::AsWritten => it,
                });
            }
            TemplatePiece::Action(it) => {
                let mut it = it.to_owned();
                for before in ["{{", " ", "("] {
                    let call = format!("{before}.Label ");
                    it = it.replace(&call, &format!("{before}index .Labels "));
                }
                text.push_str(&it);
            }
        }
    }
    Ok(text)
}

/// Returns whether a template writes the rows itself.
fn ranges_over_all(text: &str) -> bool {
    pieces(text).iter().any(|piece| match piece {
        TemplatePiece::Action(it) => content(it).split_whitespace().eq(["range", "."]),
        TemplatePiece::Text(_) => false,
    })
}

/// Returns the line of a table's titles: the template, with a title in place of each action.
fn title_line(text: &str, titles: &[(&str, &str)]) -> String {
    let mut line = String::new();
    for piece in pieces(text) {
        match piece {
            TemplatePiece::Text(it) => line.push_str(it),
            TemplatePiece::Action(action) => {
                if let Some(field) = field(content(action)) {
                    let known = titles.iter().find(|(name, _)| *name == field);
                    line.push_str(&known.map_or_else(|| title(field), |it| it.1.to_owned()));
                }
            }
        }
    }
    line
}

/// Returns the name of the first field that an action prints. `None` if it prints none.
fn field(action: &str) -> Option<&str> {
    const SILENT: [&str; 9] =
        ["block", "break", "continue", "define", "else", "end", "if", "range", "with"];
    let first = action.split_whitespace().next()?;
    if SILENT.contains(&first) || first.starts_with("/*") {
        return None;
    }
    let is_name = |it: char| it.is_alphanumeric() || it == '_' || it == '.';
    let path = action.split(|it| !is_name(it)).find(|it| it.starts_with('.') && it.len() > 1)?;
    path.rsplit('.').next().filter(|it| !it.is_empty())
}

/// Makes a title from a field's name: `CreatedAt` is `CREATED AT`, and `ImageID` is `IMAGE ID`.
fn title(field: &str) -> String {
    let mut title = String::new();
    let mut before: Option<char> = None;
    let mut rest = field.chars().peekable();
    while let Some(it) = rest.next() {
        let begins_word = it.is_uppercase()
            && before.is_some_and(|before| {
                before.is_lowercase() || rest.peek().is_some_and(|next| next.is_lowercase())
            });
        if begins_word {
            title.push(' ');
        }
        title.extend(it.to_uppercase());
        before = Some(it);
    }
    title
}

/// Aligns the columns between tabs. The last cell of a line has no width. Returns `None` if the text would be longer
/// than [`MOST_OUTPUT`], because one long value makes its column wide in each row.
fn aligned(text: &str) -> Option<String> {
    let rows: Vec<Vec<&str>> = text.split('\n').map(|line| line.split('\t').collect()).collect();
    let mut widths = Vec::new();
    for row in &rows {
        for (column, cell) in row.iter().take(row.len().saturating_sub(1)).enumerate() {
            if widths.len() <= column {
                widths.push(LEAST_COLUMN);
            }
            widths[column] = widths[column].max(cell.chars().count() + GAP);
        }
    }
    let mut out = String::new();
    for (number, row) in rows.iter().enumerate() {
        if number > 0 {
            out.push('\n');
        }
        for (column, cell) in row.iter().enumerate() {
            let is_last = column + 1 == row.len();
            let width = if is_last { 0 } else { widths[column] };
            let space = width.saturating_sub(cell.chars().count());
            if out.len().saturating_add(cell.len()).saturating_add(space) > MOST_OUTPUT {
                return None;
            }
            out.push_str(cell);
            out.extend(std::iter::repeat_n(' ', space));
        }
    }
    Some(out)
}

/// Executes a template, and appends its output.
fn execute(text: &str, value: &Json, out: &mut String) -> anyhow::Result<()> {
    let data = from_json(value, MOST_DEPTH)?;
    let before = out.len();
    let mut bounded = Bounded { out };
    let Err(error) = run(text, &data, MissingKey::Error, &mut bounded) else { return Ok(()) };
    let TemplateError::MissingKey { key } = &error else { return Err(explained(error)) };
    let owner = Owner::find(text, key, value);
    if owner.name.is_some_and(|name| OPEN_FIELDS.contains(&name)) {
        bounded.out.truncate(before);
        return run(text, &data, MissingKey::Invalid, &mut bounded).map_err(explained);
    }
    Err(owner.lacks(key))
}

fn run(
    text: &str,
    data: &Value,
    missing: MissingKey,
    out: &mut Bounded<'_>,
) -> Result<(), TemplateError> {
    let template = Template::new("").missing_key(missing).max_range_iters(MOST_ROUNDS);
    with_functions(template).parse(text)?.execute_fmt(out, data)
}

fn explained(error: TemplateError) -> anyhow::Error {
    match error {
        TemplateError::Write => too_long(),
        TemplateError::UndefinedFunction(name) => anyhow!(
            "there is no function \"{name}\": there are {}, and those of Go's templates",
            FUNCTIONS.join(", ")
        ),
        error => anyhow!(error),
    }
}

fn too_long() -> anyhow::Error {
    anyhow!("its output is longer than {}", report::size(MOST_OUTPUT as u64))
}

/// Text of limited length.
struct Bounded<'a> {
    out: &'a mut String,
}

impl fmt::Write for Bounded<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.out.len().saturating_add(text.len()) > MOST_OUTPUT {
            return Err(fmt::Error);
        }
        self.out.push_str(text);
        Ok(())
    }
}

/// The object that lacks a field.
struct Owner<'a> {
    /// Name of the field that has the object. `None` for the outermost one.
    name: Option<&'a str>,
    object: &'a Json,
}

impl<'a> Owner<'a> {
    /// Finds the object from the path before the name in the template. gotmpl's error has only the name. Inside of
    /// `range` and `with`, paths begin at another object, so the outermost object is returned.
    fn find(text: &'a str, key: &str, value: &'a Json) -> Self {
        let root = match value {
            Json::Array(all) => all.first().unwrap_or(value),
            value => value,
        };
        let is_name = |it: char| it.is_alphanumeric() || it == '_' || it == '.';
        let paths = text.split(|it| !is_name(it)).filter_map(|it| it.strip_prefix('.'));
        for path in paths {
            let mut owner = Self { name: None, object: root };
            for name in path.split('.') {
                match owner.object.get(name) {
                    Some(object) => owner = Self { name: Some(name), object },
                    None if name == key && owner.object.is_object() => return owner,
                    None => break,
                }
            }
        }
        Self { name: None, object: root }
    }

    fn lacks(&self, key: &str) -> anyhow::Error {
        let names: Vec<_> = self.object.as_object().into_iter().flat_map(|it| it.keys()).collect();
        let names: Vec<_> = names.iter().map(|it| it.as_str()).collect();
        let place = self.name.map_or_else(String::new, |name| format!(" in \"{name}\""));
        if names.is_empty() {
            return anyhow!("there is no field \"{key}\"{place}, which has no fields");
        }
        anyhow!("there is no field \"{key}\"{place}: the fields are {}", names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn container() -> Json {
        json!({
            "ID": "0123456789ab",
            "Names": ["web", "www"],
            "State": {"Status": "running", "Pid": 42, "ExitCode": 0, "OOMKilled": false},
            "Labels": {"app": "shop", "com.example.team": "a b"},
            "Mounts": [{"Source": "/a", "Type": "bind"}, {"Source": "/b", "Type": "volume"}],
            "Big": u64::MAX,
            "Ratio": 0.5,
            "Empty": [],
            "Nothing": null,
        })
    }

    /// The expected values are those of Go 1.19's text/template with podman's functions, for a map of the same data.
    #[test]
    fn templates_render_as_in_go() {
        let cases = [
            ("{{.ID}}", "0123456789ab"),
            ("{{ .ID }}", "0123456789ab"),
            ("{{.State.Status}} {{.State.Pid}}", "running 42"),
            ("{{.State.OOMKilled}}", "false"),
            ("{{.Big}} {{.Ratio}}", "18446744073709551615 0.5"),
            ("{{.Names}} {{.Empty}}", "[web www] []"),
            ("{{.Nothing}}", "<no value>"),
            ("{{.Labels}}", "map[app:shop com.example.team:a b]"),
            ("{{json .Labels}}", r#"{"app":"shop","com.example.team":"a b"}"#),
            ("{{json .Names}} {{json .State.Pid}}", r#"["web","www"] 42"#),
            ("{{.Labels | json}}", r#"{"app":"shop","com.example.team":"a b"}"#),
            (r#"{{index .Labels "com.example.team"}}"#, "a b"),
            (r#"[{{index .Labels "no"}}]"#, "[]"),
            (r#"{{.Label "app"}}{{if .Label "no"}}x{{end}}"#, "shop"),
            ("{{.Labels.app}} {{.Labels.no}}", "shop <no value>"),
            ("{{index .Names 1}}", "www"),
            ("{{(index .Mounts 0).Source}}", "/a"),
            (r#"{{range .Mounts}}{{.Type}}:{{.Source}} {{end}}"#, "bind:/a volume:/b "),
            (r#"{{range $i, $it := .Names}}{{$i}}={{$it}};{{end}}"#, "0=web;1=www;"),
            ("{{range .Empty}}x{{else}}none{{end}}", "none"),
            (r#"{{range .Mounts}}{{if eq .Type "bind"}}{{.Source}}{{end}}{{end}}"#, "/a"),
            ("{{if .State.OOMKilled}}killed{{else}}fine{{end}}", "fine"),
            ("{{if eq .State.ExitCode 0}}ok{{end}}", "ok"),
            ("{{if and .ID (gt .State.Pid 1)}}ok{{end}}", "ok"),
            ("{{len .Names}} {{len .ID}} {{len .Labels}}", "2 12 2"),
            (r#"{{join .Names ","}}"#, "web,www"),
            (
                "{{upper .State.Status}} {{lower \"AB\"}} {{title \"one two\"}}",
                "RUNNING ab One Two",
            ),
            (r#"{{index (split "a/b/c" "/") 1}}"#, "b"),
            (r#"{{truncate .ID 5}}{{pad "x" 1 2}}|"#, "01234 x  |"),
            ("{{println .ID}}", "0123456789ab\n"),
            (r#"{{printf "%s-%d" .ID .State.Pid}}"#, "0123456789ab-42"),
            (r#"{{with .State}}{{.Pid}}{{end}}"#, "42"),
            (r#"{{"{{"}}x{{"}}"}}"#, "{{x}}"),
            (r"{{.ID}}\t{{.State.Pid}}\n", "0123456789ab\t42\n"),
            (r#"{{printf "a\tb"}}"#, "a\tb"),
            ("a {{/* no }} end */}}b", "a b"),
            ("a {{- 1 -}} b", "a1b"),
            ("plain", "plain"),
            ("", ""),
            ("table {{.ID}}\t{{.State.Pid}}", "ID            PID\n0123456789ab  42"),
        ];
        for (template, expect) in cases {
            let found =
                render(template, &container()).unwrap_or_else(|it| panic!("{template}: {it:#}"));
            assert_eq!(found, expect, "{template}");
        }
    }

    #[test]
    fn an_unknown_field_is_an_error_that_names_the_others() {
        let cases = [
            (
                "{{.Id}}",
                "there is no field \"Id\": the fields are ID, Names, State, Labels, Mounts, Big, Ratio, Empty, Nothing",
            ),
            (
                "{{.ID}} {{.State.Statuz}}",
                "there is no field \"Statuz\" in \"State\": the fields are Status, Pid, ExitCode, OOMKilled",
            ),
            ("{{foo .ID}}", "there is no function \"foo\": there are index, join,"),
            ("{{.ID.Name}}", "can't evaluate field Name in type string"),
            ("{{join .ID \",\"}}", "join needs a list and a separator"),
            ("{{upper .Names}}", "upper needs a string, and got: list"),
            ("{{pad \"x\" -1 0}}", "argument 2 of pad is no length"),
            ("{{truncate .ID}}", "argument 2 of truncate is no length"),
        ];
        for (template, expect) in cases {
            let error = format!("{:#}", render(template, &container()).unwrap_err());
            let start = format!("cannot use the template \"{template}\": ");
            assert!(error.starts_with(&start), "{error}");
            assert!(error.contains(expect), "{error}");
        }
    }

    /// Each of these is an error or a text, soon.
    #[test]
    fn no_template_panics_or_grows_without_limit() {
        let deep = |many: usize, open: &str, close: &str| open.repeat(many) + &close.repeat(many);
        let cases = [
            "{{".to_owned(),
            "}}".to_owned(),
            "{{}}".to_owned(),
            "{{\"".to_owned(),
            "{{`}}".to_owned(),
            "{{/*".to_owned(),
            "{{/* */".to_owned(),
            "{{- ".to_owned(),
            "{{-".to_owned(),
            "{{.}}{{end}}".to_owned(),
            "{{.}".to_owned(),
            "{{.ä.ö}}".to_owned(),
            "{{'\\".to_owned(),
            "{{index}}".to_owned(),
            "{{index . -1}}".to_owned(),
            "{{index .Names 99999999999999999999}}".to_owned(),
            "{{slice .ID 5 1}}".to_owned(),
            "{{slice \"ä\" 0 1}}".to_owned(),
            "{{json}}".to_owned(),
            "{{printf \"%999999999d\" 1}}".to_owned(),
            "{{pad \"x\" 9999999999 0}}".to_owned(),
            "{{define \"a\"}}{{template \"a\"}}{{end}}{{template \"a\"}}".to_owned(),
            "{{range 9999999999}}{{end}}".to_owned(),
            "{{range 999999}}{{printf \"%9999d\" 1}}{{end}}".to_owned(),
            "table ".to_owned(),
            "table {{".to_owned(),
            "table \\t\\t\\n{{range .}}".to_owned(),
            deep(5000, "(", ")"),
            format!("{{{{{}1{}}}}}", "(".repeat(5000), ")".repeat(5000)),
            deep(5000, "{{if 1}}", "{{end}}"),
            deep(3000, "{{range .}}", "{{end}}"),
            ".a".repeat(10_000),
            format!("{{{{{}}}}}", ".a".repeat(10_000)),
            "x".repeat(MOST_TEMPLATE + 1),
        ];
        for template in cases {
            let rendered = render(&template, &container());
            assert!(rendered.is_err() || rendered.unwrap().len() <= MOST_OUTPUT);
            drop(list(&template, &[container()], &[]));
        }
        let mut nested = json!(1);
        for _ in 0..=MOST_DEPTH {
            nested = json!([nested]);
        }
        assert!(render("{{.}}", &nested).is_err());
    }

    fn check_list(template: &str, expect: &str) {
        let rows = [
            json!({"ID": "a", "CreatedAt": "now"}),
            json!({"ID": "long-identifier", "CreatedAt": "x"}),
        ];
        let found = list(template, &rows, &[("ID", "CONTAINER ID")]).unwrap();
        assert_eq!(found, expect, "{template}");
    }

    #[test]
    fn lists_have_a_line_for_each_row() {
        check_list("{{.ID}}", "a\nlong-identifier\n");
        check_list(r"{{.ID}}\t{{.CreatedAt}}", "a\tnow\nlong-identifier\tx\n");
        check_list(r"{{.ID}}\n", "a\nlong-identifier\n");
        check_list("{{range .}}{{.ID}};{{end}}", "a;long-identifier;\n");
        check_list("{{ range . -}} {{.ID}},{{ end -}}", "a,long-identifier,\n");
        let table = "CONTAINER ID     CREATED AT\na                now\nlong-identifier  x\n";
        check_list(r"table {{.ID}}\t{{.CreatedAt}}", table);
        check_list(
            "table {{ .ID }} {{ upper .CreatedAt }}",
            &table.replace("now", "NOW").replace("  x", "  X"),
        );
        assert_eq!(list("{{.ID}}", &[], &[]).unwrap(), "");
        assert_eq!(list("table {{.ID}}", &[], &[]).unwrap(), "ID\n");
    }

    #[test]
    fn values_forge_no_rows_or_columns() {
        let rows =
            [json!({"ID": "a\nb\tc", "Labels": {"x\ny": "\u{1b}]0;z\r\u{9b}"}, "N": ["\n"]})];
        let check = |template: &str, expect: &str| {
            assert_eq!(list(template, &rows, &[]).unwrap(), expect, "{template}");
        };
        check("{{.ID}}", "a\\nb\\tc\n");
        check("{{range .}}{{.ID}}\\n{{end}}", "a\\nb\\tc\n\n");
        check("table {{.ID}}", "ID\na\\nb\\tc\n");
        check("{{.Labels}}", "map[x\\ny:\\u{1b}]0;z\\r\\u{9b}]\n");
        check("{{range $k, $v := .Labels}}{{$k}}={{$v}}{{end}}", "x\\ny=\\u{1b}]0;z\\r\\u{9b}\n");
        check("{{join .N \"\\n\"}}", "\\n\n");
        check("{{upper .ID}}", "A\\nB\\tC\n");
        // JSON stays valid, and has the value.
        check("{{json .ID}}", "\"a\\nb\\tc\"\n");
        check("table {{json .ID}}", "ID\n\"a\\nb\\tc\"\n");
        // One object is no list: programs get its values as they are.
        assert_eq!(render("{{.ID}}", &rows[0]).unwrap(), "a\nb\tc");
    }

    #[test]
    fn one_long_value_does_not_make_a_table_endless() {
        let mut rows = vec![json!({"ID": "x", "Name": "a"}); 200];
        rows.push(json!({"ID": "x".repeat(1 << 20), "Name": "a"}));
        let error = list("table {{.ID}} {{.Name}}", &rows, &[]).unwrap_err();
        assert!(format!("{error:#}").contains("its output is longer than"), "{error:#}");
        // Without columns, the value is there once.
        assert!(list("{{.ID}} {{.Name}}", &rows, &[]).unwrap().len() < 2 << 20);
    }

    #[test]
    fn json_of_a_list_has_several_spellings() {
        for (template, expect) in [
            ("json", true),
            (" json ", true),
            ("{{json .}}", true),
            ("{{ json . }}", true),
            ("{{json}}", true),
            ("{{json .ID}}", false),
            ("{{json .}} ", true),
            ("x{{json .}}", false),
            ("{{json .}}{{json .}}", false),
            ("", false),
        ] {
            assert_eq!(is_json(template), expect, "{template}");
        }
    }

    #[test]
    fn titles_are_made_of_names() {
        for (name, expect) in [
            ("ID", "ID"),
            ("Names", "NAMES"),
            ("CreatedAt", "CREATED AT"),
            ("ImageID", "IMAGE ID"),
            ("IDHuman", "ID HUMAN"),
            ("", ""),
        ] {
            assert_eq!(title(name), expect);
        }
    }
}
