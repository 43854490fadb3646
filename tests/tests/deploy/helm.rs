//! The part of Helm's template language that the chart uses, and nothing more: anything else is an error. Helm itself is
//! not needed for the tests; `helm template` renders the same.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;
use serde_json::json;

type Result<T> = std::result::Result<T, String>;

/// A chart.
pub(super) struct Chart {
    files: BTreeMap<String, String>,
    templates: BTreeMap<String, Vec<Node>>,
    helpers: BTreeMap<String, Vec<Node>>,
    chart: Value,
    values: Value,
}

#[derive(Clone, Debug)]
enum Node {
    Text(String),
    Output(String),
    If(String, Vec<Node>),
    With(String, Vec<Node>),
    Define(String, Vec<Node>),
}

impl Chart {
    /// Reads a chart's folder.
    pub(super) fn read(folder: &Path) -> Self {
        let read = |path: &Path| fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let list = |name: &str| {
            let entries = fs::read_dir(folder.join(name)).unwrap();
            entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
        };
        let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
        let files = list("files").into_iter().map(|path| (format!("files/{}", name(&path)), read(&path))).collect();
        let mut templates = BTreeMap::new();
        let mut helpers = BTreeMap::new();
        for path in list("templates") {
            let nodes = parse(&read(&path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            for node in &nodes {
                if let Node::Define(name, body) = node {
                    helpers.insert(name.clone(), body.clone());
                }
            }
            templates.insert(name(&path), nodes);
        }
        let yaml = |name: &str| super::yaml(&read(&folder.join(name))).remove(0);
        let chart = yaml("Chart.yaml");
        let chart = json!({ "Version": chart["version"], "AppVersion": chart["appVersion"], "Name": chart["name"] });
        Self { files, templates, helpers, chart, values: yaml("values.yaml") }
    }

    /// The default values.
    pub(super) fn values(&self) -> &Value {
        &self.values
    }

    /// The documents of all templates, rendered with these values over the default ones.
    pub(super) fn render(&self, changes: &Value) -> Vec<Value> {
        let manifests = self.templates.keys().filter(|name| name.ends_with(".yaml"));
        manifests.flat_map(|name| super::yaml(&self.text(name, changes))).filter(|value| !value.is_null()).collect()
    }

    /// One rendered template.
    pub(super) fn text(&self, name: &str, changes: &Value) -> String {
        let mut values = self.values.clone();
        merge(&mut values, changes);
        let release = json!({ "Name": "observe", "Namespace": "monitoring", "Service": "Helm" });
        let root = json!({ "Values": values, "Chart": self.chart, "Release": release });
        let mut out = String::new();
        self.write(&self.templates[name], &root, &mut out).unwrap_or_else(|error| panic!("{name}: {error}"));
        out
    }

    fn write(&self, nodes: &[Node], dot: &Value, out: &mut String) -> Result<()> {
        for node in nodes {
            match node {
                Node::Text(text) => out.push_str(text),
                Node::Output(pipeline) => out.push_str(&scalar(&self.evaluate(pipeline, dot)?)?),
                Node::If(condition, body) if is_true(&self.evaluate(condition, dot)?) => self.write(body, dot, out)?,
                Node::With(pipeline, body) => {
                    let value = self.evaluate(pipeline, dot)?;
                    if is_true(&value) {
                        self.write(body, &value, out)?;
                    }
                }
                Node::If(..) | Node::Define(..) => {}
            }
        }
        Ok(())
    }

    fn evaluate(&self, pipeline: &str, dot: &Value) -> Result<Value> {
        let mut last: Option<Value> = None;
        for command in pipeline.split('|').map(str::trim) {
            let words: Vec<&str> = command.split_whitespace().collect();
            let (name, arguments) = words.split_first().ok_or("an empty command")?;
            let mut arguments: Vec<Value> = arguments.iter().map(|word| term(word, dot)).collect::<Result<_>>()?;
            arguments.extend(last.take());
            last = Some(self.call(name, arguments, dot)?);
        }
        last.ok_or_else(|| "an empty pipeline".to_owned())
    }

    fn call(&self, name: &str, arguments: Vec<Value>, dot: &Value) -> Result<Value> {
        let text = |value: &Value| value.as_str().map(str::to_owned).ok_or_else(|| format!("{name} of {value}"));
        match (name, &arguments[..]) {
            ("include", [helper, dot]) => {
                let helper = text(helper)?;
                let body = self.helpers.get(&helper).ok_or_else(|| format!("no template {helper}"))?;
                let mut out = String::new();
                self.write(body, dot, &mut out)?;
                Ok(out.into())
            }
            ("nindent", [width, value]) => {
                let indent = " ".repeat(usize::try_from(width.as_u64().ok_or("no width")?).unwrap());
                let lines = text(value)?;
                let lines = lines.trim_end().lines().map(|line| format!("\n{indent}{line}"));
                Ok(lines.collect::<String>().into())
            }
            ("toYaml", [value]) => Ok(to_yaml(value, 0).trim_end().into()),
            ("quote", [value]) => Ok(format!("{:?}", scalar(value)?).into()),
            ("default", [otherwise, value]) => Ok(if is_true(value) { value.clone() } else { otherwise.clone() }),
            (".Files.Get", [path]) => {
                let path = text(path)?;
                self.files.get(&path).map(|text| text.as_str().into()).ok_or_else(|| format!("no file {path}"))
            }
            (path, []) if path.starts_with('.') => term(path, dot),
            (name, arguments) => Err(format!("{name} with {} arguments is not known here", arguments.len())),
        }
    }
}

/// A path from the dot, a text or a number.
fn term(word: &str, dot: &Value) -> Result<Value> {
    if let Some(text) = word.strip_prefix('"') {
        return text.strip_suffix('"').map(Value::from).ok_or_else(|| format!("{word} has no end"));
    }
    if let Ok(number) = word.parse::<u64>() {
        return Ok(number.into());
    }
    let path = word.strip_prefix('.').ok_or_else(|| format!("{word} is not known here"))?;
    let mut value = dot;
    for name in path.split('.').filter(|name| !name.is_empty()) {
        // A typing error would render as nothing.
        value = value.get(name).ok_or_else(|| format!("{word} does not exist"))?;
    }
    Ok(value.clone())
}

fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(values) => !values.is_empty(),
        Value::Object(values) => !values.is_empty(),
    }
}

fn scalar(value: &Value) -> Result<String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(_) | Value::Bool(_) => Ok(value.to_string()),
        other => Err(format!("{other} is no text")),
    }
}

fn to_yaml(value: &Value, depth: usize) -> String {
    let indent = "  ".repeat(depth);
    let nested = |value: &Value| match value {
        Value::Object(map) if !map.is_empty() => format!("\n{}", to_yaml(value, depth + 1)),
        Value::Array(list) if !list.is_empty() => format!("\n{}", to_yaml(value, depth + 1)),
        // JSON is YAML.
        other => format!(" {other}\n"),
    };
    match value {
        Value::Object(map) => map.iter().map(|(key, value)| format!("{indent}{key}:{}", nested(value))).collect(),
        Value::Array(list) => list.iter().map(|value| format!("{indent}- {value}\n")).collect(),
        other => format!("{indent}{other}\n"),
    }
}

fn merge(values: &mut Value, changes: &Value) {
    match (values, changes) {
        (Value::Object(values), Value::Object(changes)) => {
            for (name, change) in changes {
                merge(values.entry(name.clone()).or_insert(Value::Null), change);
            }
        }
        (value, change) => *value = change.clone(),
    }
}

fn parse(text: &str) -> Result<Vec<Node>> {
    let mut stack: Vec<(String, Vec<Node>)> = vec![(String::new(), Vec::new())];
    let mut rest = text.to_owned();
    while let Some(start) = rest.find("{{") {
        let end = rest[start..].find("}}").ok_or("{{ without an end")? + start;
        let (mut before, mut action) = (rest[..start].to_owned(), rest[start + 2..end].to_owned());
        let mut after = rest[end + 2..].to_owned();
        if let Some(trimmed) = action.strip_prefix('-') {
            (before, action) = (before.trim_end().to_owned(), trimmed.to_owned());
        }
        if let Some(trimmed) = action.strip_suffix('-') {
            (after, action) = (after.trim_start().to_owned(), trimmed.to_owned());
        }
        push(&mut stack, Node::Text(before));
        act(&mut stack, action.trim())?;
        rest = after;
    }
    push(&mut stack, Node::Text(rest));
    match stack.pop() {
        Some((opening, nodes)) if opening.is_empty() => Ok(nodes),
        other => Err(format!("{other:?} has no end")),
    }
}

fn push(stack: &mut [(String, Vec<Node>)], node: Node) {
    stack.last_mut().expect("the outermost list stays").1.push(node);
}

fn act(stack: &mut Vec<(String, Vec<Node>)>, action: &str) -> Result<()> {
    let (first, rest) = action.split_once(' ').unwrap_or((action, ""));
    match first {
        "if" | "with" | "define" => stack.push((action.to_owned(), Vec::new())),
        "end" => {
            let (opening, body) =
                stack.pop().filter(|(opening, _)| !opening.is_empty()).ok_or("end without a begin")?;
            let (kind, what) = opening.split_once(' ').ok_or("it has no argument")?;
            let what = what.trim().to_owned();
            let node = match kind {
                "if" => Node::If(what, body),
                "with" => Node::With(what, body),
                _ => Node::Define(what.trim_matches('"').to_owned(), body),
            };
            push(stack, node);
        }
        "else" | "range" | "template" | "block" => return Err(format!("{first} is not known here")),
        _ => push(stack, Node::Output(format!("{first} {rest}").trim().to_owned())),
    }
    Ok(())
}
