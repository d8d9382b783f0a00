"""Analyses: statistics from summed answers of all clients, and results computed from a run's models.

Names are imported when they are first used, so that the registry can list analyses without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.lazy import lazy_names, make_dir, make_getattr

if TYPE_CHECKING:
    from fedloom.analyses.form import MAX_QUESTION_BYTES as MAX_QUESTION_BYTES
    from fedloom.analyses.form import Analysis as Analysis
    from fedloom.analyses.form import AnalysisTerms as AnalysisTerms
    from fedloom.analyses.form import Bounds as Bounds
    from fedloom.analyses.form import FurtherRun as FurtherRun
    from fedloom.analyses.form import Info as Info
    from fedloom.analyses.form import ModelAnalysis as ModelAnalysis
    from fedloom.analyses.form import Question as Question
    from fedloom.analyses.form import QuestionOrderError as QuestionOrderError
    from fedloom.analyses.form import Rules as Rules
    from fedloom.analyses.form import State as State
    from fedloom.analyses.form import needs_run as needs_run
    from fedloom.analyses.form import require_questions as require_questions
    from fedloom.analyses.registry import ANALYSES as ANALYSES
    from fedloom.analyses.registry import AnalysisRegistry as AnalysisRegistry
    from fedloom.analyses.rows import ClientRows as ClientRows
    from fedloom.analyses.rows import Schema as Schema
    from fedloom.analyses.rows import client_rows as client_rows
    from fedloom.analyses.rows import dataset_rows as dataset_rows
    from fedloom.analyses.rows import make_schema as make_schema
    from fedloom.analyses.run import AnalysisResult as AnalysisResult
    from fedloom.analyses.run import Answer as Answer
    from fedloom.analyses.run import Ask as Ask
    from fedloom.analyses.run import SumRecord as SumRecord
    from fedloom.analyses.run import analyze as analyze
    from fedloom.analyses.run import answer_question as answer_question
    from fedloom.analyses.run import check_analysis as check_analysis
    from fedloom.analyses.run import check_order as check_order
    from fedloom.analyses.run import resolve_analysis as resolve_analysis
    from fedloom.analyses.run import run_questions as run_questions
    from fedloom.analyses.run import sum_answers as sum_answers
    from fedloom.analyses.script import ScriptedAnalysis as ScriptedAnalysis
    from fedloom.analyses.script import Total as Total
    from fedloom.analyses.script import Transcript as Transcript

__all__ = [*lazy_names(__name__)]

__getattr__ = make_getattr(__name__)

__dir__ = make_dir(__name__)
