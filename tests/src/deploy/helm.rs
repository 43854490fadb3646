//! The part of Helm's template language that the chart uses, and nothing more: anything else is an error. Helm itself is
//! not needed for the tests; `helm template` renders the same.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use serde_json::Value;
use serde_json::json;

/// A chart.
pub struct Chart {
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
    ///
    /// # Errors
    /// A file cannot be read, or a template has what is not known here.
    pub fn read(folder: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        for path in list(&folder.join("files"))? {
            files.insert(format!("files/{}", name(&path)), super::read(&path)?);
        }
        let mut templates = BTreeMap::new();
        let mut helpers = BTreeMap::new();
        for path in list(&folder.join("templates"))? {
            let nodes = parse(&super::read(&path)?).with_context(|| format!("cannot parse {}", path.display()))?;
            for node in &nodes {
                if let Node::Define(name, body) = node {
                    helpers.insert(name.clone(), body.clone());
                }
            }
            templates.insert(name(&path), nodes);
        }
        let first = |name: &str| -> Result<Value> {
            let documents = super::yaml(&super::read(&folder.join(name))?)?;
            documents.into_iter().next().with_context(|| format!("{name} is empty"))
        };
        let chart = first("Chart.yaml")?;
        let chart = json!({ "Version": chart["version"], "AppVersion": chart["appVersion"], "Name": chart["name"] });
        Ok(Self { files, templates, helpers, chart, values: first("values.yaml")? })
    }

    /// The default values.
    pub fn values(&self) -> &Value {
        &self.values
    }

    /// The documents of all templates, rendered for a namespace with these values over the default ones.
    ///
    /// # Errors
    /// A template has what is not known here, or renders to what is not YAML.
    pub fn render(&self, namespace: &str, changes: &Value) -> Result<Vec<Value>> {
        let mut documents = Vec::new();
        for name in self.templates.keys().filter(|name| name.ends_with(".yaml")) {
            documents.extend(super::yaml(&self.text(name, namespace, changes)?)?);
        }
        documents.retain(|document| !document.is_null());
        Ok(documents)
    }

    /// One rendered template.
    ///
    /// # Errors
    /// It does not exist, or has what is not known here.
    pub fn text(&self, name: &str, namespace: &str, changes: &Value) -> Result<String> {
        let mut values = self.values.clone();
        merge(&mut values, changes);
        let release = json!({ "Name": "observe", "Namespace": namespace, "Service": "Helm" });
        let root = json!({ "Values": values, "Chart": self.chart, "Release": release });
        let mut out = String::new();
        let nodes = self.templates.get(name).with_context(|| format!("there is no template {name}"))?;
        self.write(nodes, &root, &mut out).with_context(|| format!("cannot render {name}"))?;
        Ok(out)
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
            let (name, arguments) = words.split_first().context("an empty command")?;
            let mut arguments: Vec<Value> = arguments.iter().map(|word| term(word, dot)).collect::<Result<_>>()?;
            arguments.extend(last.take());
            last = Some(self.call(name, arguments, dot)?);
        }
        last.context("an empty pipeline")
    }

    fn call(&self, name: &str, arguments: Vec<Value>, dot: &Value) -> Result<Value> {
        let text = |value: &Value| value.as_str().map(str::to_owned).with_context(|| format!("{name} of {value}"));
        match (name, &arguments[..]) {
            ("include", [helper, dot]) => {
                let helper = text(helper)?;
                let body = self.helpers.get(&helper).with_context(|| format!("no template {helper}"))?;
                let mut out = String::new();
                self.write(body, dot, &mut out)?;
                Ok(out.into())
            }
            ("nindent", [width, value]) => {
                let indent = " ".repeat(usize::try_from(width.as_u64().context("no width")?)?);
                let lines = text(value)?;
                let lines = lines.trim_end().lines().map(|line| format!("\n{indent}{line}"));
                Ok(lines.collect::<String>().into())
            }
            ("toYaml", [value]) => Ok(to_yaml(value, 0).trim_end().into()),
            ("quote", [value]) => Ok(format!("{:?}", scalar(value)?).into()),
            ("default", [otherwise, value]) => Ok(if is_true(value) { value.clone() } else { otherwise.clone() }),
            (".Files.Get", [path]) => {
                let path = text(path)?;
                self.files.get(&path).map(|text| text.as_str().into()).with_context(|| format!("no file {path}"))
            }
            (path, []) if path.starts_with('.') => term(path, dot),
            (name, arguments) => bail!("{name} with {} arguments is not known here", arguments.len()),
        }
    }
}

/// A path from the dot, a text or a number.
fn term(word: &str, dot: &Value) -> Result<Value> {
    if let Some(text) = word.strip_prefix('"') {
        return text.strip_suffix('"').map(Value::from).with_context(|| format!("{word} has no end"));
    }
    if let Ok(number) = word.parse::<u64>() {
        return Ok(number.into());
    }
    let path = word.strip_prefix('.').with_context(|| format!("{word} is not known here"))?;
    let mut value = dot;
    for name in path.split('.').filter(|name| !name.is_empty()) {
        // A typing error would render as nothing.
        value = value.get(name).with_context(|| format!("{word} does not exist"))?;
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
        other => bail!("{other} is no text"),
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

/// The files of a folder.
fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    Ok(entries.flatten().map(|entry| entry.path()).collect())
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn parse(text: &str) -> Result<Vec<Node>> {
    let mut stack: Vec<(String, Vec<Node>)> = vec![(String::new(), Vec::new())];
    let mut rest = text.to_owned();
    while let Some(start) = rest.find("{{") {
        let end = rest[start..].find("}}").context("{{ without an end")? + start;
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
        other => bail!("{other:?} has no end"),
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
                stack.pop().filter(|(opening, _)| !opening.is_empty()).context("end without a begin")?;
            let (kind, what) = opening.split_once(' ').context("it has no argument")?;
            let what = what.trim().to_owned();
            let node = match kind {
                "if" => Node::If(what, body),
                "with" => Node::With(what, body),
                _ => Node::Define(what.trim_matches('"').to_owned(), body),
            };
            push(stack, node);
        }
        "else" | "range" | "template" | "block" => bail!("{first} is not known here"),
        _ => push(stack, Node::Output(format!("{first} {rest}").trim().to_owned())),
    }
    Ok(())
}
