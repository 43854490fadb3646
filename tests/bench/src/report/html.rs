//! One HTML page that needs nothing else.

use std::fmt::Write as _;

use super::Metric;
use super::Report;
use super::plot;
use super::table;
use super::targets;

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;max-width:920px;margin:2em auto;padding:0 1em;color:#222;background:#fff}\
h2{font-size:1.1em;margin:2.2em 0 .4em}table{border-collapse:collapse}\
td,th{padding:.15em .9em .15em 0;text-align:right;font-weight:normal;font-variant-numeric:tabular-nums}\
th{color:#777}td:first-child,th:first-child{text-align:left}\
i{display:inline-block;width:.8em;height:.8em;margin-right:.5em;border-radius:2px}\
b.bar{display:inline-block;height:.7em;border-radius:2px}\
svg{max-width:100%;height:auto}.missed{color:#b00020}p{margin:.3em 0}";

/// The page.
pub(super) fn render(report: &Report) -> anyhow::Result<String> {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>keblet bench {name}</title>\
         <style>{STYLE}</style></head><body>\n<h1>keblet bench {name}</h1>\n<p>{}; {} rounds</p>\n",
        escaped(&report.environment.line()),
        report.rounds,
        name = report.name,
    );
    for metric in report.metrics() {
        let _ = writeln!(page, "<h2>{}</h2>", escaped(&report.title(metric)));
        page.push_str(&figures(report, metric));
        page.push_str(&plot::distribution(report, metric)?.unwrap_or_default());
    }
    page.push_str(&verdicts(report));
    page.push_str("</body></html>\n");
    Ok(page)
}

fn figures(report: &Report, metric: Metric) -> String {
    let rows = table::rows(report, metric);
    let largest = report.columns.iter().filter_map(|column| report.results.summary(metric, column)).map(|s| s.p50);
    let largest = largest.fold(0.0, f64::max);
    let mut html = "<table>\n".to_owned();
    for (index, row) in rows.iter().enumerate() {
        let cell = if index == 0 { "th" } else { "td" };
        html.push_str("<tr>");
        for (place, text) in row.iter().enumerate() {
            let mark = if index > 0 && place == 0 { swatch(report, text) } else { String::new() };
            let _ = write!(html, "<{cell}>{mark}{}</{cell}>", escaped(text));
        }
        if index > 0 && metric.is_single() && largest > 0.0 {
            html.push_str(&bar(report, metric, &row[0], largest));
        }
        html.push_str("</tr>\n");
    }
    html + "</table>\n"
}

fn swatch(report: &Report, column: &str) -> String {
    format!("<i style=\"background:{}\"></i>", colour(report, column))
}

fn bar(report: &Report, metric: Metric, column: &str, largest: f64) -> String {
    let value = report.results.summary(metric, column).map_or(0.0, |summary| summary.p50);
    let width = value / largest * 320.0;
    let colour = colour(report, column);
    format!("<td style=\"text-align:left\"><b class=\"bar\" style=\"width:{width:.0}px;background:{colour}\"></b></td>")
}

fn colour(report: &Report, column: &str) -> String {
    plot::css_colour(report.columns.iter().position(|known| known == column).unwrap_or_default())
}

fn verdicts(report: &Report) -> String {
    let mut html = String::new();
    let verdicts = targets::judge(&report.results);
    if !verdicts.is_empty() {
        html.push_str("<h2>targets</h2>\n");
    }
    for verdict in verdicts {
        let (class, word) = if verdict.is_kept() { ("met", "met") } else { ("missed", "MISSED") };
        let _ = writeln!(html, "<p class=\"{class}\">{word}: {}</p>", escaped(&verdict.promise));
    }
    for failure in &report.results.failures {
        let _ = writeln!(html, "<p class=\"missed\">went wrong: {}</p>", escaped(failure));
    }
    html
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::tests::report;
    use super::*;

    #[test]
    fn the_page_is_complete_and_escaped() {
        let page = render(&report()).unwrap();
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
        assert!(page.contains("&lt;pod&gt; ran twice") && !page.contains("<pod>"), "{page}");
        assert_eq!(page.matches("<svg").count(), 1, "one distribution was measured");
        assert_eq!(page.matches("class=\"bar\"").count(), 2);
        assert!(!page.contains("src=") && !page.contains("href="), "needs nothing else");
    }
}
