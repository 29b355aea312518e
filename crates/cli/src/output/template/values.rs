//! Values of templates, and the functions that podman adds to Go's. Source: podman, `pkg/report/template.go` of
//! containers/common.

use std::sync::Arc;

use anyhow::bail;
use gotmpl::{Template, TemplateError, Value};
use serde_json::Value as Json;

use crate::output::template::disguise::reveal;

/// Maximum number of nested lists and objects in a value. Quire's own reports have fewer than ten.
pub(super) const MOST_DEPTH: usize = 64;

/// Maximum number of spaces that `pad` adds on a side.
const MOST_SPACES: usize = 1000;

/// Functions besides Go's own. Source: podman, `template.go`.
pub(super) const FUNCTIONS: [&str; 9] =
    ["index", "join", "json", "lower", "pad", "split", "title", "truncate", "upper"];

pub(super) fn from_json(value: &Json, depth: usize) -> anyhow::Result<Value> {
    let Some(below) = depth.checked_sub(1) else {
        bail!("its value has more than {MOST_DEPTH} levels")
    };
    Ok(match value {
        Json::Null => Value::Nil,
        Json::Bool(it) => Value::Bool(*it),
        Json::String(it) => Value::String(it.as_str().into()),
        Json::Number(it) => match (it.as_i64(), it.as_u64(), it.as_f64()) {
            (Some(it), ..) => Value::Int(it),
            (None, Some(it), _) => Value::Uint(it),
            (None, None, Some(it)) => Value::Float(it),
            (None, None, None) => Value::String(it.to_string().into()),
        },
        Json::Array(all) => {
            let all: anyhow::Result<Vec<_>> = all.iter().map(|it| from_json(it, below)).collect();
            Value::List(all?.into())
        }
        Json::Object(all) => {
            let field = |(name, it): (&String, &Json)| -> anyhow::Result<(Arc<str>, Value)> {
                Ok((Arc::from(name.as_str()), from_json(it, below)?))
            };
            Value::Map(Arc::new(all.iter().map(field).collect::<anyhow::Result<_>>()?))
        }
    })
}

fn to_json(value: &Value) -> Json {
    match value {
        Value::Nil | Value::Function(_) => Json::Null,
        Value::Bool(it) => Json::Bool(*it),
        Value::Int(it) => Json::from(*it),
        Value::Uint(it) => Json::from(*it),
        Value::Float(it) => Json::from(*it),
        // JSON has its own escapes.
        Value::String(it) => Json::from(reveal(it)),
        Value::List(all) => all.iter().map(to_json).collect(),
        Value::Map(all) => {
            Json::Object(all.iter().map(|(name, it)| (reveal(name), to_json(it))).collect())
        }
    }
}

/// Adds the functions that Go does not have. `index` replaces Go's, because a missing entry of an object is empty, as
/// those of a `map[string]string` are, which labels and options are in podman.
pub(super) fn with_functions(template: Template) -> Template {
    let template = template.func("index", |args| {
        let Some((first, path)) = args.split_first() else {
            return Err(TemplateError::Exec("index needs a list or an object".to_owned()));
        };
        path.iter().try_fold(first.clone(), |value, key| match (&value, key) {
            (Value::Map(all), Value::String(key)) if !all.contains_key(key) => {
                Ok(Value::String("".into()))
            }
            _ => value.index(key),
        })
    });
    let template = template.func("json", |args| {
        let json = args.first().map_or(Json::Null, to_json);
        Ok(Value::String(json.to_string().into()))
    });
    let template = template.func("join", |args| {
        let Some(Value::List(all)) = args.first() else {
            return Err(TemplateError::Exec("join needs a list and a separator".to_owned()));
        };
        let all: Vec<_> = all.iter().map(ToString::to_string).collect();
        Ok(Value::String(all.join(text("join", args, 1)?).into()))
    });
    let template = template.func("split", |args| {
        let (it, separator) = (text("split", args, 0)?, text("split", args, 1)?);
        // Like Go, an empty separator splits after each character.
        let parts: Vec<Value> = if separator.is_empty() {
            it.chars().map(|it| Value::String(it.to_string().into())).collect()
        } else {
            it.split(separator).map(|it| Value::String(it.into())).collect()
        };
        Ok(Value::List(parts.into()))
    });
    let template = template
        .func("lower", |args| Ok(Value::String(text("lower", args, 0)?.to_lowercase().into())))
        .func("upper", |args| Ok(Value::String(text("upper", args, 0)?.to_uppercase().into())))
        .func("title", |args| Ok(Value::String(words(text("title", args, 0)?).into())));
    let template = template.func("truncate", |args| {
        let (it, most) = (text("truncate", args, 0)?, number("truncate", args, 1)?);
        let end = it.char_indices().nth(most).map_or(it.len(), |(at, _)| at);
        Ok(Value::String(it[..end].into()))
    });
    template.func("pad", |args| {
        let it = text("pad", args, 0)?;
        let (before, after) = (number("pad", args, 1)?, number("pad", args, 2)?);
        if it.is_empty() {
            return Ok(Value::String("".into()));
        }
        let spaces = |many: usize| " ".repeat(many.min(MOST_SPACES));
        Ok(Value::String(format!("{}{it}{}", spaces(before), spaces(after)).into()))
    })
}

/// Returns an argument that must be a string.
fn text<'a>(function: &str, args: &'a [Value], at: usize) -> Result<&'a str, TemplateError> {
    match args.get(at) {
        Some(Value::String(it)) => Ok(it),
        Some(other) => {
            let kind = other.type_name();
            Err(TemplateError::Exec(format!("{function} needs a string, and got: {kind}")))
        }
        None => Err(TemplateError::Exec(format!("{function} needs {} arguments", at + 1))),
    }
}

/// Returns an argument that must be a length.
fn number(function: &str, args: &[Value], at: usize) -> Result<usize, TemplateError> {
    let number = args.get(at).and_then(Value::as_int).and_then(|it| usize::try_from(it).ok());
    number.ok_or_else(|| {
        TemplateError::Exec(format!("argument {} of {function} is no length", at + 1))
    })
}

/// Makes the first letter of each word a capital.
fn words(it: &str) -> String {
    let mut out = String::new();
    let mut begins = true;
    for it in it.chars() {
        if begins {
            out.extend(it.to_uppercase());
        } else {
            out.push(it);
        }
        begins = !(it.is_alphanumeric() || it == '_' || it == '\'');
    }
    out
}
