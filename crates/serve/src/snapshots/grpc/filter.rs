//! containerd's filters for lists. Source: its package `filters`: `fieldpath`, or `fieldpath operator value`,
//! separated by commas, all of which must match.

use regex_lite::Regex;

/// A syntax error in a filter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("filter \"{}\", at character {at}: {why}", filter.escape_debug())]
pub struct FilterError {
    filter: String,
    /// Position in characters, counted from 1.
    at: usize,
    /// The mistake at this position.
    why: String,
}

/// Filters of which at least one must match. An empty list matches everything.
#[derive(Debug, Default)]
pub struct Filters(Vec<Vec<Selector>>);

#[derive(Debug)]
struct Selector {
    field: Vec<String>,
    test: Test,
}

#[derive(Debug)]
enum Test {
    Present,
    Equal(String),
    Other(String),
    Matches(Regex),
}

impl Filters {
    /// Parses filters.
    pub fn parse<'a>(filters: impl IntoIterator<Item = &'a str>) -> Result<Self, FilterError> {
        let parsed = filters.into_iter().map(|filter| Parser { filter, at: 0 }.selectors());
        parsed.collect::<Result<_, _>>().map(Self)
    }

    /// Returns whether a filter matches. `value` returns the value of a field, or `None` if the field is absent.
    pub fn hold<'v>(&self, value: impl Fn(&[String]) -> Option<&'v str>) -> bool {
        let holds = |it: &Selector| it.holds(value(&it.field));
        self.0.is_empty() || self.0.iter().any(|all| all.iter().all(holds))
    }
}

impl Selector {
    /// Returns whether a field matches. An absent field counts as empty.
    fn holds(&self, value: Option<&str>) -> bool {
        match &self.test {
            Test::Present => value.is_some(),
            Test::Equal(wanted) => value.unwrap_or_default() == wanted,
            Test::Other(unwanted) => value.unwrap_or_default() != unwanted,
            Test::Matches(pattern) => value.is_some_and(|it| pattern.is_match(it)),
        }
    }
}

struct Parser<'a> {
    filter: &'a str,
    at: usize,
}

impl<'a> Parser<'a> {
    fn selectors(mut self) -> Result<Vec<Selector>, FilterError> {
        let mut all = Vec::new();
        if self.filter.is_empty() {
            return Ok(all);
        }
        loop {
            all.push(self.selector()?);
            match self.rest().chars().next() {
                None => return Ok(all),
                Some(',') => self.at += 1,
                Some(_) => return Err(self.failed("expected a comma, or the end of the filter")),
            }
        }
    }

    fn selector(&mut self) -> Result<Selector, FilterError> {
        let mut field = vec![self.field()?];
        while self.rest().starts_with('.') {
            self.next();
            field.push(self.field()?);
        }
        let rest = self.rest();
        if rest.is_empty() || rest.starts_with(',') {
            return Ok(Selector { field, test: Test::Present });
        }
        let operator = rest.get(..2).unwrap_or_default();
        if !["==", "!=", "~="].contains(&operator) {
            return Err(self.failed("expected ==, != or ~="));
        }
        self.at += operator.len();
        let test = match operator {
            "==" => Test::Equal(self.value(&['"', '\''])?),
            "!=" => Test::Other(self.value(&['"', '\''])?),
            _ => {
                let begin = self.at;
                let pattern = Regex::new(&self.value(&['"', '\'', '/', '|'])?);
                Test::Matches(pattern.map_err(|error| {
                    self.at = begin;
                    self.failed(&error.to_string())
                })?)
            }
        };
        Ok(Selector { field, test })
    }

    fn field(&mut self) -> Result<String, FilterError> {
        if self.rest().starts_with(['"', '\'']) {
            return self.quoted();
        }
        let is_field = |it: char| it.is_ascii_alphanumeric() || it == '_';
        let rest = self.rest();
        let field = rest.split(|it| !is_field(it)).next().unwrap_or_default();
        if !field.starts_with(|it: char| it.is_ascii_alphabetic()) {
            return Err(self.failed("expected the name of a field"));
        }
        self.at += field.len();
        Ok(field.to_owned())
    }

    fn value(&mut self, quotes: &[char]) -> Result<String, FilterError> {
        if self.rest().starts_with(quotes) {
            return self.quoted();
        }
        let rest = self.rest();
        let value = rest.split(|it: char| it == ',' || it.is_whitespace()).next();
        let value = value.unwrap_or_default();
        if value.is_empty() {
            return Err(self.failed("expected a value"));
        }
        self.at += value.len();
        Ok(value.to_owned())
    }

    /// Parses a quoted value. A backslash escapes the quote, another backslash, and n, r and t.
    fn quoted(&mut self) -> Result<String, FilterError> {
        let begin = self.at;
        let quote = self.next();
        let mut value = String::new();
        loop {
            let char = match self.next() {
                None => {
                    self.at = begin;
                    return Err(self.failed("this quote has no end"));
                }
                end if end == quote => return Ok(value),
                Some('\\') => {
                    let after = self.at;
                    match self.next() {
                        Some('n') => '\n',
                        Some('r') => '\r',
                        Some('t') => '\t',
                        Some(char) if char == '\\' || Some(char) == quote => char,
                        // A pattern keeps its own escapes.
                        Some(char) if matches!(quote, Some('/' | '|')) => {
                            value.push('\\');
                            char
                        }
                        _ => {
                            self.at = after;
                            return Err(self.failed("invalid character after a backslash"));
                        }
                    }
                }
                Some(char) => char,
            };
            value.push(char);
        }
    }

    fn rest(&self) -> &'a str {
        self.filter.get(self.at..).unwrap_or_default()
    }

    fn next(&mut self) -> Option<char> {
        let char = self.rest().chars().next()?;
        self.at += char.len_utf8();
        Some(char)
    }

    fn failed(&self, why: &str) -> FilterError {
        let at = self.filter.get(..self.at).unwrap_or_default().chars().count() + 1;
        FilterError { filter: self.filter.to_owned(), at, why: why.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value<'v>(field: &[String]) -> Option<&'v str> {
        let field: Vec<_> = field.iter().map(String::as_str).collect();
        match field[..] {
            ["kind"] => Some("active"),
            ["name"] => Some("a, b"),
            ["labels", "containerd.io/gc.root"] => Some("x"),
            ["labels", "empty"] => Some(""),
            _ => None,
        }
    }

    #[test]
    fn filters_of_containerd() {
        let cases: [(&[&str], bool); 19] = [
            (&[], true),
            (&[""], true),
            (&["kind==active"], true),
            (&["kind==view"], false),
            (&["kind!=view"], true),
            (&["kind"], true),
            (&["parent"], false),
            (&["parent=="], false),
            (&["parent==\"\""], true),
            (&["labels.empty"], true),
            (&["labels.\"containerd.io/gc.root\"==x"], true),
            (&["labels.'containerd.io/gc.root'==x,kind==view"], false),
            (&["labels.\"containerd.io/gc.root\"==x,kind==active"], true),
            (&["kind==view", "kind==active"], true),
            (&["name==\"a, b\""], true),
            (&["kind~=^act"], true),
            (&["kind~=/^a.t\\w+$/"], true),
            (&["kind~=|view|"], false),
            (&["parent~=.*"], false),
        ];
        for (filters, expect) in cases {
            let found = Filters::parse(filters.iter().copied()).map(|it| it.hold(value));
            match filters {
                ["parent=="] => assert!(found.is_err()),
                _ => assert_eq!(found, Ok(expect), "{filters:?}"),
            }
        }
    }

    #[test]
    fn what_is_no_filter() {
        for (filter, at) in [
            ("kind=", 5),
            ("=x", 1),
            ("kind==", 7),
            ("kind==a b", 8),
            ("labels.\"x", 8),
            ("kind==active,", 14),
            ("1==x", 1),
            ("kind~=(", 7),
            ("ä==x", 1),
            ("name==\"ä\\x\"", 10),
        ] {
            let error = Filters::parse([filter]).unwrap_err();
            assert_eq!(error.at, at, "{error}");
        }
    }
}
